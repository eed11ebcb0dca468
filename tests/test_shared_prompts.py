from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import train
from extras import head, monitor, shared_prompts
from extras.shared_prompts import SharedBatch
from recipes.algorithms import AlgorithmConfig
from recipes.critic import load_critic
from recipes.trainer import AlgorithmTrainer
from tests.conftest import FORMS, VOCAB, Config, VariantTrainer, plain_logprobs, random_model
from train import Batch, Sample

pytestmark = pytest.mark.filterwarnings("ignore")


def sample_of(prompt: list[int], completion: list[int], mask=1, **columns) -> Sample:
    sample = Sample([], {})
    sample.append(prompt)
    sample.append(completion, mask=mask, logprob=-1.0, **columns)
    return sample


def grouped_samples() -> list[Sample]:
    """Groups of 3, 1 and 4, prompts of 6, 1 and 4 tokens; the last group has masked replies."""
    generator = np.random.default_rng(0)
    samples = []
    for number, (size, prompt) in enumerate([(3, 6), (1, 1), (4, 4)]):
        ids = generator.integers(0, VOCAB, prompt)
        for i in range(size):
            t = int(generator.integers(5, 12))
            sample = sample_of(ids, generator.integers(0, VOCAB, t), advantage=generator.normal())
            sample.key = (number, i)
            if number == 2:
                sample.tokens["mask"][prompt + 2 : prompt + 4] = 0
            samples.append(sample)
    train.set_weights(samples, len(samples))
    return samples


def test_a_shared_batch_by_hand():
    first = sample_of([5, 6], [7, 8], mask=[1, 1])
    other = sample_of([9], [5])
    second = sample_of([5, 6], [3, 4, 2], mask=[1, 0, 1])
    batch = SharedBatch([first, other, second], "cpu")
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9, 5, 3, 4, 2]]
    assert batch.source.tolist() == [1, 2, 4, 1, 7] and batch.targets.tolist() == [7, 8, 5, 3, 2]
    layout = {name: part.tolist() for name, part in batch.layout.items() if name != "longest"}
    assert layout["position_ids"] == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]
    assert layout["keys"] == [0, 1, 2, 3, 4, 5, 0, 1, 6, 7, 8]
    assert layout["bounds"] == [0, 4, 6, 9] and layout["key_bounds"] == [0, 4, 6, 11]
    assert (
        batch.shared == [0, 0, 2]
        and batch.layout["longest"] == 5
        and batch.layout["bounds"].dtype == torch.int32
    )


def test_groups_stay_whole_or_in_few_pieces():
    def sizes(lists):
        return [[len(sample.tokens) for sample in part] for part in lists]

    group = [sample_of([1] * 10, [2] * n) for n in (3, 1, 2)]  # 10 + 6 tokens
    others = [sample_of([3] * 4, [2] * n) for n in (5, 6)]  # 4 + 11
    assert sizes(SharedBatch.pack(group + others, 16, 1)) == [[13, 12, 11], [10, 9]]
    assert sizes(SharedBatch.pack(group + others, 31, 1)) == [[13, 12, 11, 10, 9]]
    assert sizes(SharedBatch.pack(group, 15, 1)) == [[13, 11], [12]]  # 10 + 3 + 1, 10 + 2
    assert sizes(SharedBatch.pack(group, 12, 1)) == [[13], [12], [11]]
    assert sizes(SharedBatch.pack(group, 16, 2)) == [[13, 12, 11], []] and SharedBatch.pack([], 9, 1) == [[]]


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("budget", [10**6, 24])
def test_shared_equal_plain_log_probs_and_gradients(mesh, tmp_path, name, budget):
    kind, form = name.split("-")
    folder = random_model(tmp_path, kind, form == "tied")
    policy = train.load_policy(str(folder), mesh, Config(temperature=0.6, device="cpu"), VOCAB)
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for batch_class, score in ((Batch, train.head_logprobs), (SharedBatch, head.head_logprobs)):
        policy.head_logprobs = score
        policy.zero_grad()
        logprobs = {}
        for part in batch_class.pack(deepcopy(grouped_samples()), budget, 1):
            batch = batch_class(part, "cpu")
            values, entropy = policy.logprobs(batch)
            (batch.weights * (batch.advantages * values + 0.1 * entropy)).sum().backward()
            lengths = [int(sample.tokens["mask"].sum()) for sample in part]
            for sample, *parts in zip(part, values.split(lengths), entropy.split(lengths)):
                logprobs[sample.key] = torch.stack(parts).detach()
        gradients = torch.cat([one.grad.full_tensor().flatten() for one in policy.parameters()])
        found.append((logprobs, gradients))
    (plain, plain_gradient), (shared, gradient) = found
    for sample in grouped_samples():
        torch.testing.assert_close(shared[sample.key], plain[sample.key], rtol=1e-6, atol=2e-6)
        expected = plain_logprobs(model, sample, 0.6)
        torch.testing.assert_close(shared[sample.key][0], expected, rtol=1e-5, atol=2e-5)
    assert (gradient - plain_gradient).norm() < 1e-5 * plain_gradient.norm() > 0


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5"])
def test_a_critic_sees_the_same_states(mesh, tmp_path, kind):
    folder = random_model(tmp_path, kind)
    critic = load_critic(str(folder), mesh, Config(device="cpu"))
    torch.nn.init.normal_(critic.value_head.weight.to_local())
    samples = grouped_samples()
    torch.testing.assert_close(
        critic.values(SharedBatch(samples, "cpu")), critic.values(Batch(samples, "cpu"))
    )


def test_the_flag_chooses_the_layout():
    class Core:
        batch_class = Batch

        def __init__(self, config):
            self.config = config

    sharing = shared_prompts.extend(Core)
    sample = grouped_samples()[0]
    on, off = (sharing(Config(share_prompts=value)) for value in (True, False))
    assert (on.batch_class, on.shared_tokens(sample)) == (SharedBatch, 6)
    assert (off.batch_class, off.shared_tokens(sample)) == (Batch, 0)
    assert SharedBatch([], "cpu").targets.tolist() == Batch([], "cpu").targets.tolist()  # a filler


@pytest.mark.parametrize("budget", [10**6, 40])
def test_a_step_with_a_failed_group_two_updates_and_kl(small, budget):
    """Both layouts end with the same weights; a later update leaves pi_old, so its ratio is not 1."""
    generator = np.random.default_rng(1)
    samples = []
    for number, prompt in enumerate([5, 9, 1, 7]):
        ids = generator.integers(0, VOCAB, prompt)
        for i in range(3):
            sample = sample_of(ids, generator.integers(0, VOCAB, 4 + 3 * i))
            sample.key, sample.reward = (number, i), float(generator.normal())
            samples.append(sample)
    samples[1].failure = "it broke"  # so that all of group 0 is left out
    ends = []
    for batch_class in (Batch, SharedBatch):
        trainer = small(group_size=3, updates_per_step=2, kl_coef=0.5, tokens_per_micro_batch=budget, lr=1e-3)
        trainer.reference = trainer.load_policy()
        trainer.batch_class = batch_class
        trainer.max_failures = 1.0
        trainer.check_engine = lambda gap: None
        metrics = [trainer.learn(deepcopy(samples)) for _ in range(2)][-1]
        ends.append(
            (metrics, torch.cat([one.full_tensor().flatten() for one in trainer.actor.parameters.values()]))
        )
    (plain, weights), (shared, others) = ends
    start = torch.cat([one.full_tensor().flatten() for one in trainer.reference.parameters()])
    assert plain.keys() == shared.keys() and plain["kl"] > 1e-4 and plain["clip_fraction"] > 0
    assert shared == pytest.approx(plain, rel=1e-4)
    assert (others - weights).norm() < 1e-4 * (weights - start).norm()


def groups_of_three() -> list[Sample]:
    """Two groups with prompts of 20 tokens and completions of 5, 6, 7."""
    samples = []
    for number in range(2):
        for i in range(3):
            sample = sample_of([number + 3] * 20, [7] * (5 + i), advantage=1.0 + i)
            sample.key, sample.rewards = (number, i), [1.0]
            samples.append(sample)
    return samples


@pytest.mark.parametrize("kind", ["train.py", "recipes"])
def test_micro_batches_keep_groups_whole(mesh, columns, kind):
    config = AlgorithmConfig(engine="local", device="cpu", tokens_per_micro_batch=40)
    trainer = object.__new__(train.Trainer if kind == "train.py" else AlgorithmTrainer)
    vars(trainer).update(config=config, mesh=mesh, batch_class=SharedBatch)
    batches = trainer.micro_batches(groups_of_three())
    assert [batch.ids.numel() for batch in batches] == [20 + 5 + 6 + 7] * 2


def test_the_share_of_tokens_saved_is_logged(whole):
    trainer = whole(
        trainer_class=monitor.extend(shared_prompts.extend(VariantTrainer)), group_size=4, steps=1
    )
    metrics, samples = trainer.step()
    trained = [sample for sample in samples if sample.tokens["advantage"].any()]
    prompts = {sample.key[0]: shared_prompts.prompt_length(sample) for sample in trained}
    repeated = sum(prompts[sample.key[0]] for sample in trained) - sum(prompts.values())
    plain = sum(len(sample.tokens) for sample in trained)
    assert 0 < metrics["shared_tokens"] == pytest.approx(repeated / plain)
