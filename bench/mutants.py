"""Would the fast tests notice? Errors that a person could make in train.py, and which test catches each.

    python -m bench.mutants [--only NAME ...] [--output FILE]

Each mutant below is train.py with one line changed. It is written into a copy of the repository, where the
fast tests run until one of them fails: at first those that take a few seconds, then those with several
processes, then all others. Tests of a file's form, and those that quote train.py, stay out. Before a mutant
meets a set of tests, the intact train.py must have passed it.

Prints a line per mutant: its name, the outcome, seconds, the first test that failed. "caught": a test failed,
or hung for three times as long as all tests of its set take ("timeout"). "invalid": the mutant does not
compile, or pytest ended in another way than by a failed test. Exits with code 1 if a mutant is invalid or
fewer than LEAST are caught. Without --only the table is also written to assets/mutants.json.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.measure import ASSETS, ROOT, write

LEAST = 36  # mutants that must be caught
LEFT_OUT = (".git", ".venv", ".pytest_cache", ".hypothesis", "__pycache__", "runs", "wandb")
TRAIN = "test_train.py::test_"
FORM = [  # tests of the file's form
    "train_is_short",
    "train_is_formatted",
    "train_imports_rewards_alone_and_rewards_nothing_of_this_repository",
]
PROCESSES = [  # tests that start others
    "loss_and_gradient_do_not_depend_on_ranks_split_or_tp",
    "whole_weights_are_those_of_the_folder_and_the_export_loads",
    "a_short_run_does_not_depend_on_the_ranks",
    "the_lone_pair_needs_extras_for_the_local_engine",
]
DETAILS = ["dataset", "extras", "failures", "flags", "gpu", "sglang"]  # tests/test_NAME.py
ELSEWHERE = ["rewards", "reward_workers", "sandbox", "view"]  # tests of other files, some by the clock
QUOTING = ["docs", "bench"]  # test_bench.py looks for each line that is changed here
SETS = {  # of tests, as arguments of pytest
    "quick": [
        "test_train.py",
        *(f"tests/test_{name}.py" for name in DETAILS),
        *(f"--deselect={TRAIN}{name}" for name in FORM + PROCESSES),
    ],
    "processes": [TRAIN + name for name in PROCESSES],
    "others": [
        "tests",
        *(f"--ignore=tests/test_{name}.py" for name in DETAILS + ELSEWHERE + QUOTING),
        "--deselect=tests/test_rehearse.py::test_a_rehearsal_by_hand",  # which quotes lines as well
    ],
}


class Mutant(NamedTuple):
    name: str
    old: str  # a text that occurs once in train.py
    new: str


def parse(text: str) -> list[Mutant]:
    """A name, then lines as in a diff: -old, +new. What follows the sign is taken to the letter."""
    mutants = []
    for block in text.strip().split("\n\n"):
        name, *lines = block.split("\n")
        sides = ["\n".join(line[1:] for line in lines if line[0] == sign) for sign in "-+"]
        mutants.append(Mutant(name, *sides))
    return mutants


MUTANTS = parse(r'''
the flags of the embedded job beside a --model
-    if not GPU and "--model" not in given and EMBEDDED.exists():
+    if not GPU and EMBEDDED.exists():

--data=FILE evaluated on countdown
-    if "--data" in given:
+    if "--data" in arguments:

text of the last turn only
-        return "".join(self.turns)
+        return self.turns[-1] if self.turns else ""

a slice of JSON from the first row
-            self.rows = rows[part.from_ : part.to]
+            self.rows = rows[: part.to]

control tokens not escaped
-.replace("<|", "<\u200b|")
+

no generation prompt
-apply_chat_template(json.loads(text), add_generation_prompt=True, return_dict=False)
+apply_chat_template(json.loads(text), add_generation_prompt=False, return_dict=False)

truncated not set
-        ids, logprobs, versions, sample.truncated = await generate(sample.tokens["id"], turn)
+        ids, logprobs, versions, _ = await generate(sample.tokens["id"], turn)

log-probs of -inf accepted
- or not np.isfinite(logprobs).all():
+ or np.isnan(logprobs).any():

no version of the weights
-        sample.append(ids, turn=turn, mask=1, logprob=logprobs, version=versions)
+        sample.append(ids, turn=turn, mask=1, logprob=logprobs)

a reply after the last turn
-        if reply is None or turn == config.max_turns - 1:
+        if reply is None or turn == config.max_turns:

replies trained
-        sample.append(tokenizer.encode(reply, add_special_tokens=False), turn=turn)
+        sample.append(tokenizer.encode(reply, add_special_tokens=False), turn=turn, mask=1)

room off by one
-        sample.truncated = len(sample.tokens) > room
+        sample.truncated = len(sample.tokens) >= room

groups across instead of along
-    groups = rewards.view(-1, group_size)
+    groups = rewards.view(group_size, -1).T

sum for mean in advantages
-    advantages = groups - groups.mean(dim=1, keepdim=True)
+    advantages = groups - groups.sum(dim=1, keepdim=True)

std added
-        advantages = advantages / (groups.std(dim=1, keepdim=True) + 1e-6)
+        advantages = advantages + (groups.std(dim=1, keepdim=True) + 1e-6)

std of the population
-groups.std(dim=1, keepdim=True) + 1e-6)
+groups.std(dim=1, keepdim=True, unbiased=False) + 1e-6)

epsilon of 1e-4
-groups.std(dim=1, keepdim=True) + 1e-6)
+groups.std(dim=1, keepdim=True) + 1e-4)

equal rewards not masked
-    return advantages.masked_fill(all_equal, 0.0).flatten()
+    return advantages.flatten()

sequence average over the prompt as well
-            denominator = count * sample.tokens["mask"].sum()
+            denominator = count * len(sample.tokens)

token average per rank
-            denominator = tokens
+            denominator = sum(one.tokens["mask"].sum() for one in samples)

constant average without the batch
-            denominator = count * config.max_new_tokens
+            denominator = config.max_new_tokens

ratio inverted
-    ratio = (logprobs - batch.old_logprobs).exp()
+    ratio = (batch.old_logprobs - logprobs).exp()

clip bounds swapped
-    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
+    clipped = ratio.clamp(1 - config.clip_high, 1 + config.clip_low)

sign of clip_low
-    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
+    clipped = ratio.clamp(1 + config.clip_low, 1 + config.clip_high)

sign of the loss
-    loss = -torch.minimum(unclipped, clipped)
+    loss = torch.minimum(unclipped, clipped)

max for min
-    loss = -torch.minimum(unclipped, clipped)
+    loss = -torch.maximum(unclipped, clipped)

TIS bounded from below
-.exp().clamp(max=config.tis_cap)
+.exp().clamp(min=config.tis_cap)

TIS inverted
-        loss = loss * (batch.old_logprobs - batch.engine_logprobs).exp()
+        loss = loss * (batch.engine_logprobs - batch.old_logprobs).exp()

TIS of the current policy
-        loss = loss * (batch.old_logprobs - batch.engine_logprobs).exp()
+        loss = loss * (logprobs.detach() - batch.engine_logprobs).exp()

KL the other way
-        gap = batch.ref_logprobs - logprobs
+        gap = logprobs - batch.ref_logprobs

sign in k3
-        kl = gap.exp() - gap - 1
+        kl = gap.exp() + gap - 1

sign of the KL term
-        loss = loss + config.kl_coef * kl
+        loss = loss - config.kl_coef * kl

sign of the entropy bonus
-        loss = loss - config.entropy_coef * entropy
+        loss = loss + config.entropy_coef * entropy

mean for sum over tokens
-    return (batch.weights * loss).sum(), stats
+    return (batch.weights * loss).mean(), stats

filler of ones
-    filler = np.zeros(2, TOKEN)
+    filler = np.ones(2, TOKEN)

positions not reset per sample
-        "positions": (np.arange(len(tokens)) - np.repeat(bounds[:-1], lengths))[None],
+        "positions": np.arange(len(tokens))[None],

source off by one
-        "source": trained - 1,
+        "source": trained,

shortest first
-key=lambda sample: len(sample.tokens), reverse=True)
+key=lambda sample: len(sample.tokens))

budget in samples
-        if all(size <= budget or len(part) == 1 for size, part in zip(sizes, packs)):
+        if all(len(part) <= budget for part in packs):

budget off by one
-        if all(size <= budget or len(part) == 1 for size, part in zip(sizes, packs)):
+        if all(size < budget or len(part) == 1 for size, part in zip(sizes, packs)):

replicas not summed
-"fsdp": both if copies > 1 else mesh["shard"]}
+"fsdp": mesh["shard"]}

counts summed over tp as well
-    dist.all_reduce(tensor, op, group=mesh.get_group())
+    dist.all_reduce(tensor, op)

sum for maximum over ranks
-    dist.all_reduce(tensor, op, group=mesh.get_group())
+    dist.all_reduce(tensor, group=mesh.get_group())

GPU kernel not causal
-"window_size": (-1, 0), "scale": scaling,
+"window_size": (-1, -1), "scale": scaling,

samples see their neighbors
-    lengths = bounds.diff().tolist()
+    lengths = [query.shape[2]]

attention not causal
-        scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
+        scaled_dot_product_attention(q, k, v, is_causal=False, scale=scaling, enable_gqa=True)

k_norm not split
-for name in "qk"}
+for name in "q"}

tie of embeddings lost without tp
-    if model.config.tie_word_embeddings:
+    if model.config.tie_word_embeddings and mesh["tp"].size() > 1:

recomputation never on
-    if config.gradient_checkpointing:
+    if config.gradient_checkpointing and GPU:

gradients reduced in the compute dtype
-reduce_dtype=torch.float32)
+reduce_dtype=getattr(torch, config.dtype))

gradients averaged over ranks
-        unit.set_gradient_divide_factor(1.0)
+        pass

gradients not force-summed
-        unit.set_force_sum_reduction_for_comms(True)
+        unit.set_force_sum_reduction_for_comms(False)

rotary tables stay wiped
-        model.get_buffer(name).copy_(value)
+        model.get_buffer(name)

each tp rank begins at token 0
-    first = tp.get_local_rank() * len(head)
+    first = 0

head's gradient summed in the compute dtype
-    head = head.float()
+    head = head.contiguous()

gradient of the states not summed over tp
-to_local(grad_placements=[Partial()])
+to_local(grad_placements=[Replicate()])

temperature forgotten
-.float().div_(temperature)
+.float()

temperature squared
-.float().div_(temperature)
+.float().div_(temperature**2)

logits in the compute dtype
-.T).float().div_(temperature)
+.T).div_(temperature)

padding of the whole vocabulary on each tp rank
-        logits[:, max(0, vocab_size - first) :] = -1e30
+        logits[:, vocab_size:] = -1e30

padding of more than a tp rank's share
-        logits[:, max(0, vocab_size - first) :] = -1e30
+        logits[:, vocab_size - first :] = -1e30

maximum of this tp rank only
-        logits.sub_(reduced(logits.detach().amax(dim=1), "max")[:, None])
+        logits.sub_(logits.detach().amax(dim=1)[:, None])

sums of this tp rank only
-        chosen, total, weighted = reduced(torch.stack(sums))
+        chosen, total, weighted = sums

sign in the entropy
-total.log() - weighted / total
+total.log() + weighted / total

default weight decay
-"betas": (0.9, 0.99), "weight_decay": 0.0, "fused": True}
+"betas": (0.9, 0.99), "fused": True}

schedule in steps, not updates
-        updates = config.steps * config.updates_per_step
+        updates = config.steps

warm-up ignored
-get_scheduler(config.lr_schedule, self.optimizer, config.warmup_steps, updates)
+get_scheduler(config.lr_schedule, self.optimizer, 0, updates)

fillers counted as tokens
-            real = batch.weights > 0
+            real = batch.weights >= 0

statistics of one rank
-dict(zip(sums, reduce_over(self.mesh["dp"], torch.stack([*sums.values()]).tolist())))
+dict(zip(sums, torch.stack([*sums.values()]).tolist()))

clipping at 1 whatever the flag
-clip_grad_norm_(parameters, self.config.max_grad_norm, foreach=True)
+clip_grad_norm_(parameters, 1.0, foreach=True)

norm of this rank's shard
-self.config.max_grad_norm, foreach=True).full_tensor()
+self.config.max_grad_norm, foreach=True).to_local()

gradient of NaN taken
-        if norm.isfinite():
+        if norm is not None:

gradient of inf taken
-        if norm.isfinite():
+        if not norm.isnan():

schedule stands still
-            self.scheduler.step()
+            pass

gradient of NaN kept
-        self.optimizer.zero_grad()
+            self.optimizer.zero_grad()

pushed tensors not cloned
-if isinstance(w, DTensor) else w).clone()) for name, w in new]
+if isinstance(w, DTensor) else w)) for name, w in new]

layers stay gathered after a push
-            unit.reshard()
+            pass

layers pushed twice
-if prefix or ".layers." not in one[0]]
+if True]

export says float32
-            self.model.config.dtype = self.config.dtype
+            self.model.config.dtype = "float32"

SGLang's prompts on each rank
-        self.share = slice(None if self.group.rank() == 0 else 0)
+        self.share = slice(None)

SGLang on global rank 0 only
-        if self.group.rank() == 0:
+        if RANK == 0:

SGLang samples evaluations at the training temperature
-        sampling = {"temperature": temperature, "sampling_seed": seed,
+        sampling = {"temperature": self.config.temperature, "sampling_seed": seed,

failures that SGLang returns ignored
-if isinstance(answer, tuple) else (getattr(answer, "success", True), answer)
+if isinstance(answer, tuple) else (True, answer)

SGLang flushed once, busy or not
-        while self.engine and not self.engine.flush_cache().success:
+        if self.engine and not self.engine.flush_cache().success:

version not counted
-        self.version += 1
+        pass

SGLang takes all memory before the weights
-        self.call("resume_memory_occupation", tags=["weights"])
+        self.call("resume_memory_occupation", tags=["weights", "kv_cache", "cuda_graph"])

one payload for all of SGLang's ranks
-self.call("update_weights_from_tensor", payloads,
+self.call("update_weights_from_tensor", payloads[:1] * len(payloads),

no wait until SGLang has measured its memory
-        self.barrier()  # SGLang measures
+        pass  # SGLang measures

CUDA graphs that stay
-["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
+["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "0"

prefill graphs, which cannot be released
-options["disable_prefill_cuda_graph"] = True
+options["disable_prefill_cuda_graph"] = False

expandable segments
-os.environ.pop("PYTORCH_CUDA_ALLOC_CONF", None)
+pass

torchrun's store for SGLang's groups
-os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
+pass

GPUs that travel by number
-            monkey_patch_torch_reductions()  # GPUs
+            pass  # GPUs

a bucket freed while SGLang copies it
-            sent = self.send(bucket)
+            sent = [self.send(bucket)].clear()

the last bucket kept while SGLang's cache returns
-        del sent
+        pass

caches kept while SGLang wakes up
-            torch.cuda.empty_cache()
+            pass

the reference gathered during the update
-                self.reference.reshard()
+                pass

extras in reverse
-EXTRAS = "help sglang_cpu watchdog dither compile offload balance monitor gate checkpoint checks"
+EXTRAS = "checks checkpoint gate monitor balance offload compile dither watchdog sglang_cpu help"

evaluation on the training data
-dataset_class(config.eval_data) if config.eval_data and config.eval_every
+dataset_class(config.data) if config.eval_data and config.eval_every

room without the completion
-        self.room = AutoConfig.from_pretrained(self.path).max_position_embeddings - config.max_new_tokens
+        self.room = AutoConfig.from_pretrained(self.path).max_position_embeddings

the actor as its own reference
-        self.reference = self.load_policy() if config.kl_coef else None
+        self.reference = self.actor.model if config.kl_coef else None

no prompts for the last part of an epoch
-        epochs = range(1 + config.steps * config.prompts_per_step // len(self.data))
+        epochs = range(max(1, config.steps * config.prompts_per_step // len(self.data)))

every epoch in one order
-        seeds = [torch.Generator().manual_seed(hash((config.seed, epoch))) for epoch in epochs]
+        seeds = [torch.Generator().manual_seed(config.seed) for epoch in epochs]

no step at the end
-        for step in range(self.first_step, self.config.steps + 1):
+        for step in range(self.first_step, self.config.steps):

no evaluation at the end
-            if self.eval_data and (step % self.config.eval_every == 0 or step == self.config.steps):
+            if self.eval_data and step % self.config.eval_every == 0:

no sleep before learning
-        self.engine.sleep()
-        metrics = self.learn(samples)
+        metrics = self.learn(samples)

no push after learning
-        self.publish()
-        return metrics, samples
+        return metrics, samples

the same prompts every step
-        self.draws += 1
+        pass

prompts dealt without regard to updates
-one[0] // config.updates_per_step % self.ranks == self.rank]
+one[0] % self.ranks == self.rank]

a prompt that just fits left out
-            fits = len(prompt.tokens) <= self.room
+            fits = len(prompt.tokens) < self.room

one object for a group
-                sample = deepcopy(prompt)
+                sample = prompt

a group that shares its row
-                sample = deepcopy(prompt)
+                sample = Sample(prompt.messages, prompt.row, prompt.tokens)

keys by row instead of place
-                sample.key = (place, i)
+                sample.key = (row, i)

seeds that ignore the prompt
-hash((self.config.seed, *sample.key, turn))
+hash((self.config.seed, sample.key[1], turn))

seeds that ignore the place in the group
-hash((self.config.seed, *sample.key, turn))
+hash((self.config.seed, sample.key[0], turn))

seeds that ignore the turn
-hash((self.config.seed, *sample.key, turn))
+hash((self.config.seed, *sample.key))

a user's error fails a sample
-        except UserError:
+        except KeyboardInterrupt:

failures forgotten
-            sample.failure = "".join(traceback.format_exception(error)[-2:])
+            traceback.format_exception(error)[-2:]

rewards of inf accepted
-        if reward is None or not np.isfinite([reward, *sample.metrics.values()]).all():
+        if reward is None or np.isnan([reward, *sample.metrics.values()]).any():

--normalize_std ignored
-group_advantages(scores, self.config.group_size, self.config.normalize_std)
+group_advantages(scores, self.config.group_size, True)

failed groups kept
-        whole = [sample for sample in samples if sample.key[0] not in failed]
+        whole = samples

failed samples left out of their groups
-        whole = [sample for sample in samples if sample.key[0] not in failed]
+        whole = [sample for sample in samples if not sample.failure]

groups split over updates
-if sample.key[0] % count == i] for i in range(count)]
+if sample.key[1] % count == i] for i in range(count)]

reference log-probs from the actor
-                batch.ref_logprobs, _ = self.reference.logprobs(batch)
+                batch.ref_logprobs, _ = self.actor.model.logprobs(batch)

second update takes its own pass for the old one
-            for batch in sum(updates[1:], []):
+            for batch in sum(updates[2:], []):

any engine taken for exact
-                exact = self.engine.exact
+                exact = True

difference to the engine over all updates
-        return means | {"logprob_diff": history[0]["logprob_diff"]}
+        return means

counts of this rank
-        set_weights(samples, self.config, *reduce_over(self.mesh["dp"], [len(samples), trained]))
+        set_weights(samples, self.config, len(samples), trained)

no entropy bonus without advantage
-        always = self.config.kl_coef or self.config.entropy_coef
+        always = self.config.kl_coef

fewest micro-batches of any rank
-[len(pack(useful, budget, 1))], dist.ReduceOp.MAX)
+[len(pack(useful, budget, 1))], dist.ReduceOp.MIN)

old log-probs not detached
-            batch.old_logprobs = logprobs.detach()
+            batch.old_logprobs = logprobs

gate the wrong way round
-        if self.config.gate == "stop" and not gap <= BOUND[self.config.dtype]:
+        if self.config.gate == "stop" and gap <= BOUND[self.config.dtype]:

gate open for NaN
-        if self.config.gate == "stop" and not gap <= BOUND[self.config.dtype]:
+        if self.config.gate == "stop" and gap > BOUND[self.config.dtype]:

every rank evaluates all rows
-        prompts = [(row, row) for row in range(self.rank, len(self.eval_data), self.ranks)]
+        prompts = [(row, row) for row in range(len(self.eval_data))]

evaluation at the training temperature
-        samples = self.sample(self.eval_data, prompts, 1, self.config.eval_temperature)
+        samples = self.sample(self.eval_data, prompts, 1, self.config.temperature)

evaluation of one rank
-reduce_over(self.mesh["dp"], [sum(sample.reward for sample in samples), len(samples)])
+[sum(sample.reward for sample in samples), len(samples)]

an older run written over
-touch(exist_ok=bool(self.config.resume))
+touch(exist_ok=True)

samples of each tp rank logged
-        mine = samples if self.mesh["tp"].get_local_rank() == 0 else []
+        mine = samples

records in the order of ranks
-        records = sorted(sum(parts, []), key=lambda record: record["key"])
+        records = sum(parts, [])

missing metrics counted as 0
-            metrics[name] = np.mean([found[name] for found in numbers if name in found])
+            metrics[name] = np.mean([found.get(name, 0) for found in numbers])

metrics.jsonl overwritten
-        with open(self.folder / "metrics.jsonl", "a") as file:
+        with open(self.folder / "metrics.jsonl", "w") as file:
''')  # fmt: skip


def mutate(source: str, mutant: Mutant) -> str:
    """The source with the mutant's change. Ends the program if there is not exactly one place for it."""
    count = source.count(mutant.old)
    if count != 1:
        sys.exit(
            f'bench/mutants.py: "{mutant.name}": {mutant.old!r} occurs {count} times in train.py, not once'
        )
    return source.replace(mutant.old, mutant.new)


def end(process: subprocess.Popen):
    """Kills a run of the tests with every process below it; ranks have sessions of their own."""
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    for child in below:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


class Copy:
    """A copy of the repository, whose train.py may be changed."""

    def __init__(self, scratch: Path):
        self.folder = scratch / "copy"
        self.log = scratch / "log"
        self.temporary = scratch / "pytest"
        shutil.copytree(ROOT, self.folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
        self.intact = (self.folder / "train.py").read_text()
        self.limits = {}  # seconds for each set of tests

    def test(self, source: str, tests: str, limit: float | None) -> tuple[str, str]:
        """Runs a set of tests on a train.py. Returns the outcome, or "passed", and the first failure."""
        (self.folder / "train.py").write_text(source)
        options = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", f"--basetemp={self.temporary}"]
        command = [Path(sys.executable).with_name("pytest"), *options, *SETS[tests]]
        settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
        with self.log.open("w") as log:
            place = {"cwd": self.folder, "env": os.environ | settings}
            options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(command, **place, **options)
            try:
                code = process.wait(limit)
            except BaseException as error:
                end(process)
                if isinstance(error, subprocess.TimeoutExpired):
                    return "timeout", f"one of: {tests}"
                raise
        text = self.log.read_text()
        failed = re.search(r"^(?:FAILED|ERROR) (?:\S+::)?(.+?)(?: - |$)", text, re.MULTILINE)
        if code in (0, 1):
            return ("passed", "caught")[code], failed[1] if failed else ""
        return "invalid", f"pytest ended with code {code}: {' '.join(text.split())[-200:]}"

    def limit(self, tests: str) -> float:
        """Three times what a set of tests takes on the intact train.py, which must pass."""
        if tests not in self.limits:
            began = time.perf_counter()
            outcome, detail = self.test(self.intact, tests, None)
            if outcome != "passed":
                sys.exit(f"bench/mutants.py: the intact train.py does not pass the tests ({tests}): {detail}")
            self.limits[tests] = max(300.0, 3 * (time.perf_counter() - began))
        return self.limits[tests]

    def judge(self, mutant: Mutant) -> dict:
        """The row of a mutant."""
        source = mutate(self.intact, mutant)
        try:
            compile(source, "train.py", "exec")
        except SyntaxError as error:
            return {"mutant": mutant.name, "outcome": "invalid", "seconds": 0.0, "by": str(error)}
        seconds = 0.0
        for tests in SETS:
            limit = self.limit(tests)
            began = time.perf_counter()
            outcome, by = self.test(source, tests, limit)
            seconds += time.perf_counter() - began
            if outcome != "passed":
                break
        found = {"passed": "SURVIVED"}.get(outcome, outcome)
        return {"mutant": mutant.name, "outcome": found, "seconds": round(seconds, 1), "by": by}


def main():
    """Tests all mutants, or some."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [mutant.name for mutant in MUTANTS]
    parser.add_argument("--only", nargs="+", default=names, metavar="NAME", help="these mutants")
    parser.add_argument("--output", type=Path, help="file for the table")
    flags = parser.parse_args()
    unknown = [name for name in flags.only if name not in names]
    if unknown:
        parser.error(f"no such mutant: {', '.join(unknown)}; there are: {'; '.join(names)}")
    chosen = [mutant for mutant in MUTANTS if mutant.name in flags.only]
    rows = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("SIGTERM"))  # cleans up, as Ctrl-C does
    with tempfile.TemporaryDirectory() as scratch:
        copy = Copy(Path(scratch))
        for mutant in MUTANTS:
            mutate(copy.intact, mutant)  # all of them, before the first hour has passed
        for mutant in chosen:
            rows.append(copy.judge(mutant))
            print("{mutant:54} {outcome:9} {seconds:6.1f}  {by}".format(**rows[-1]), flush=True)
    outcomes = Counter(row["outcome"] for row in rows)
    caught = outcomes["caught"] + outcomes["timeout"]
    print(f"{caught} of {len(rows)} caught")
    output = flags.output or (ASSETS / "mutants.json" if chosen == MUTANTS else None)
    if output:
        write(output, rows=rows)
    sys.exit(caught < min(LEAST, len(rows)) or outcomes["invalid"] > 0)


if __name__ == "__main__":
    main()
