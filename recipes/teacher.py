"""The teacher of recipes/distill.py: a model or servers, and divergences over the whole vocabulary."""

from dataclasses import replace
from functools import partial
from itertools import cycle

import torch
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint
from transformers import AutoTokenizer

import train
from extras import checks, servers, watchdog
from train import Sample, UserError

CHUNK_ELEMENTS = 2**23  # logits of one model that exist at once, forward and backward


def check_tokenizer(config, path: str):
    """Raises UserError unless the teacher's tokenizer in a folder maps texts to the student's ids."""
    with checks.blaming(f"--teacher {config.teacher}: its tokenizer {path} cannot be loaded"):
        known = AutoTokenizer.from_pretrained(path).get_vocab()
    expected = AutoTokenizer.from_pretrained(config.model).get_vocab()
    different = known.items() ^ expected.items()
    if different:
        count = len({token for token, _ in different})
        raise UserError(f"--teacher {config.teacher} has another vocabulary: {count} tokens differ")


def find_teacher(config) -> str:
    """The teacher's folder. Raises UserError if it cannot be used."""
    try:
        path, _ = checks.check_model(replace(config, model=config.teacher))
        checks.check_weights(path)
    except UserError as error:
        raise UserError(str(error).replace("--model", "--teacher")) from error
    check_tokenizer(config, path)
    return path


class TeacherServers:
    """SGLang servers that score tokens in turn."""

    def __init__(self, config):
        try:
            urls = servers.parse_urls(config.teacher)
        except UserError as error:
            raise UserError(str(error).replace("--engine", "--teacher")) from error
        timeout = getattr(config, "engine_timeout", watchdog.Flags.engine_timeout)
        self.servers = [servers.Server(url, timeout, backend="") for url in urls]
        self.turns = cycle(self.servers)

    async def check(self, config):
        """Raises UserError unless each server runs, with the student's vocabulary."""
        for server in self.servers:
            with checks.blaming(f"--teacher {server.url} cannot be used"):
                check_tokenizer(config, (await server.post("server_info"))["tokenizer_path"])

    async def score(self, sample: Sample):
        """Sets the column teacher_logprob. Raises ConnectionError if a server fails."""
        first = int(sample.tokens["mask"].argmax())
        payload = {"input_ids": sample.tokens["id"].tolist(), "sampling_params": {"max_new_tokens": 0}}
        payload |= {"return_logprob": True, "logprob_start_len": first - 1}  # which itself has none
        response = await next(self.turns).post("generate", **payload)
        scored = response["meta_info"]["input_token_logprobs"][1:]  # (log-prob, id, text) of each token
        if [token[1] for token in scored] != payload["input_ids"][first:]:
            raise ConnectionError("--teacher: a server returned log-probs of other tokens")
        sample.tokens["teacher_logprob"][first:] = [token[0] for token in scored]

    async def close(self):
        """Ends the connections."""
        for server in self.servers:
            if server.session:
                await server.session.close()


def hidden_states(model, batch) -> torch.Tensor:
    """The last hidden states [N, H], which predict a batch's targets."""
    return model.model(batch.ids, use_cache=False, **batch.layout).last_hidden_state[0, batch.source]


def add_states(model):
    """Gives a sharded model the method states(batch) -> [N, H]."""
    model.states = partial(hidden_states, model)
    register_fsdp_forward_method(model, "states")  # FSDP gathers the root's weights for it


def load_teacher(path: str, mesh: dict, config, vocab_size: int):
    """A frozen model as train.load_policy loads one, but in the compute dtype, with `states`."""
    model = train.empty_model(path)
    for weight in model.parameters():
        weight.requires_grad = False
        weight.data = weight.data.to(getattr(torch, config.dtype))
    model = train.shard(model, mesh, config)
    train.dcp.load(dict(model.named_parameters()), storage_reader=model.reader)
    fixed = {"temperature": config.temperature, "vocab_size": vocab_size, "tp": mesh["tp"]}
    model.logprobs = partial(train.policy_logprobs, model, **fixed)
    register_fsdp_forward_method(model, "logprobs")
    add_states(model)
    return model


def local_head(model) -> torch.Tensor:
    """This rank's part of a model's head, [V / tp, H], while the root is gathered."""
    weight = model.lm_head.weight
    return weight.to_local() if isinstance(weight, DTensor) else weight


def head_part(teacher, rows: int, tp) -> torch.Tensor:
    """A copy of the rows of a gathered teacher's head that face this rank's `rows` of the student's."""
    weight = teacher.lm_head.weight
    whole = weight.full_tensor() if isinstance(weight, DTensor) else weight  # its own parts may differ
    part = whole[tp.get_local_rank() * rows :][:rows]
    return pad(part, (0, 0, 0, rows - len(part)))


def full_scores(student, teacher, targets, kd_loss: str, temperature: float, vocab_size: int, tp):
    """Log-probs, entropies and divergences [N] of targets [N], in chunks as in train.head_logprobs.

    student and teacher are states [N, H] and this rank's part of a head, [V / tp, H], for the same ids.
    """
    (states, head), (teacher_states, teacher_head) = student, teacher
    first = tp.get_local_rank() * len(head)  # this rank's part of the vocabulary begins here
    head = head.float()  # its gradient is a sum over the chunks, in fp32
    if tp.size() > 1:  # the gradient of the states is a sum over the ranks
        states = DTensor.from_local(states, tp, [Replicate()]).to_local(grad_placements=[Partial()])

    def over_ranks(values, op="sum"):
        return DTensor.from_local(values, tp, [Partial(op)]).full_tensor() if tp.size() > 1 else values

    def shifted_logits(states, head):
        logits = (states @ head.to(states.dtype).T).float().div_(temperature)  # [chunk, V / tp]
        logits[:, max(0, vocab_size - first) :] = -1e30  # embedding rows beyond the vocabulary
        return logits.sub_(over_ranks(logits.detach().amax(dim=1), "max")[:, None])

    def score(states, teacher_states, targets):
        z = shifted_logits(states, head)
        teacher_z = shifted_logits(teacher_states, teacher_head)
        exps = z.exp()
        teacher_exps = teacher_z.exp()
        owns_target = (targets >= first) & (targets < first + len(head))
        chosen = z.gather(1, ((targets - first) * owns_target)[:, None])[:, 0] * owns_target
        sums = [chosen, exps.sum(dim=1), torch.linalg.vecdot(exps, z), teacher_exps.sum(dim=1)]
        weights = exps if kd_loss == "reverse" else teacher_exps
        sums.append(torch.linalg.vecdot(weights, z - teacher_z))
        chosen, total, weighted, teacher_total, gap = over_ranks(torch.stack(sums))
        log_ratio = total.log() - teacher_total.log()
        reverse = gap / total - log_ratio  # E_S[log pi_S - log pi_T]
        forward = log_ratio - gap / teacher_total  # E_T[log pi_T - log pi_S]
        divergence = reverse if kd_loss == "reverse" else forward
        return chosen - total.log(), total.log() - weighted / total, divergence

    chunk = max(128, CHUNK_ELEMENTS // len(head))  # tokens whose logits of both exist at once
    scores = []
    for part in zip(states.split(chunk), teacher_states.split(chunk), targets.split(chunk)):
        scores.append(checkpoint(score, *part, use_reentrant=False, preserve_rng_state=False))
    return tuple(map(torch.cat, zip(*scores)))
