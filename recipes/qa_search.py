"""Questions that need looking up: the policy searches a folder of texts before it answers.

    pip install bm25s
    torchrun --standalone --nproc_per_node=4 -m recipes.qa_search --data qa.jsonl --index texts/ --max_turns 4

A turn with <search>some words</search> is answered with the best passages; a turn with <answer>...</answer> ends the
episode. The index is BM25 (the library bm25s) over the files of --index: each line of a .jsonl (its "text", or
"contents"), each paragraph of another file. Or --index is http://host:port/retrieve, which is asked as Search-R1's
server is: {"queries": [...], "topk": n}. Rows have question, and answer or answers; the reward is the exact match of
SQuAD (arXiv:1606.05250): lower case, without articles and punctuation. F1 is logged beside it.
"""
import asyncio
import json
import re
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path


from recipes.turns import user_turn
from tools.inputs import UserError, flag
from train import Config, RLDataset, Sample, Trainer, main

PROMPT = ("{}\nTo look something up, write <search>words</search> and wait. When you know the answer, write it alone "
          "into <answer> </answer> tags.")


@dataclass
class SearchConfig(Config):
    """What train.py has, and the index."""
    max_turns: int = flag(4, "turns of the policy in an episode")
    index: str = flag("", "a folder of texts, or http://host:port/retrieve")
    passages: int = flag(3, "how many a search returns")

    def __post_init__(self):
        if not self.index:
            raise UserError("--index must name a folder of texts, or http://host:port/retrieve")
        if self.passages < 1:
            raise UserError(f"--passages must be 1 or more, not {self.passages}")
        super().__post_init__()


class QADataset(RLDataset):
    """Rows of questions."""

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        if not row.get("question") or not (row.get("answer") or row.get("answers")):
            raise UserError(f"{self.source}: row {index} needs question, and answer or answers")
        return Sample([{"role": "user", "content": PROMPT.format(row["question"])}], row)


def read_passages(folder: str) -> list[str]:
    """All texts below a folder. Raises UserError where there are none."""
    found = []
    for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            found += [row.get("text") or row.get("contents") or "" for row in rows]
        else:
            found += re.split(r"\n\s*\n", text)
    found = [passage.strip() for passage in found if passage.strip()]
    if not found:
        raise UserError(f"--index {folder} has no texts")
    return found


class Index:
    """Passages, best first, for some words."""

    def __init__(self, where: str, count: int):
        self.where, self.count = where, count
        if not where.startswith(("http://", "https://")):
            import bm25s        # optional
            self.passages, self.bm25 = read_passages(where), bm25s.BM25()
            self.tokenize = lambda texts: bm25s.tokenize(texts, stopwords=None, show_progress=False)
            self.bm25.index(self.tokenize(self.passages), show_progress=False)

    def search(self, query: str) -> list[str]:
        """At most `count` of them."""
        if self.where.startswith("http"):
            body = json.dumps({"queries": [query], "topk": self.count, "return_scores": False}).encode()
            request = urllib.request.Request(self.where, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                (found,) = json.load(answer)["result"]
            return [passage.get("contents") or passage.get("text", "") for passage in found]
        (places,), (scores,) = self.bm25.retrieve(self.tokenize([query]), k=min(self.count, len(self.passages)),
                                                  show_progress=False)
        return [self.passages[place] for place, score in zip(places, scores) if score > 0]


def normal(text: str) -> list[str]:
    """The words that count in a comparison."""
    return re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[^\w\s]", "", text.lower())).split()


def exact_match(answer: str, golds: list[str]) -> float:
    """1 if the answer is one of them."""
    return float(any(normal(answer) == normal(gold) for gold in golds))


def f1(answer: str, golds: list[str]) -> float:
    """The best harmonic mean of precision and recall of words."""
    best, words = 0.0, normal(answer)
    for gold in map(normal, golds):
        common = sum((Counter(words) & Counter(gold)).values())
        best = max(best, 2 * common / (len(words) + len(gold)) if common else 0.0)
    return best


def reward_fn(sample: Sample) -> float:
    """Exact match of the last <answer>."""
    golds = sample.row.get("answers") or [str(sample.row["answer"])]
    found = re.findall(r"<answer>(.*?)</answer>", sample.turns[-1], re.DOTALL)
    sample.metrics |= {"f1": f1(found[-1], golds) if found else 0.0, "searches": float(len(sample.turns) - 1)}
    return exact_match(found[-1], golds) if found else 0.0


class SearchTrainer(Trainer):
    """A Trainer whose episodes may search."""

    def __init__(self, config, dataset_class, reward_fn, env_step):
        self.index = Index(config.index, config.passages)
        super().__init__(config, dataset_class, reward_fn, self.search)

    async def search(self, sample: Sample) -> str | None:
        """The passages for the turn's first query; None after an answer, or without a query."""
        query = re.search(r"<search>(.*?)</search>", sample.turns[-1], re.DOTALL)
        if "</answer>" in sample.turns[-1] or not query:
            return None
        found = await asyncio.to_thread(self.index.search, query[1].strip())
        return user_turn("\n".join(f"({i}) {text[:1000]}" for i, text in enumerate(found, 1)) or "Nothing was found.")


if __name__ == "__main__":
    main(SearchConfig, QADataset, reward_fn, trainer_class=SearchTrainer)
