"""Questions that need looking up: the policy searches a folder of texts before it answers.

    pip install bm25s
    torchrun --standalone --nproc_per_node=4 -m recipes.qa_search --data qa.jsonl --index texts/ --max_turns 4

A turn with <search>some words</search> is answered by the best passages; one with <answer>...</answer> ends
the episode. The index is BM25 (the library bm25s) over the files of --index: each line of a .jsonl (its
"text", or "contents"), each paragraph of another file. Or --index is http://host:port/retrieve, which is
called like Search-R1's server: {"queries": [...], "topk": n}. Rows have question, and answer or answers; the
reward is SQuAD's exact match (arXiv:1606.05250): lower case, without articles and punctuation. F1 is logged
as well.
"""

import asyncio
import json
import re
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from recipes.turns import user_turn
from train import Config, RLDataset, Sample, Trainer, UserError, flag, main

PROMPT = (
    "{}\nTo look something up, write <search>words</search> and wait. When you know the answer, write it "
    "alone into <answer> </answer> tags."
)

QUIET = {"stopwords": None, "show_progress": False}  # options of bm25s.tokenize


@dataclass
class SearchConfig(Config):
    """The core's flags, and the index."""

    max_turns: int = flag(4, "policy turns per episode")
    index: str = flag("", "folder of texts, or http://host:port/retrieve")
    passages: int = flag(3, "passages per search")

    def __post_init__(self):
        if not self.index:
            raise UserError("--index must name a folder of texts, or http://host:port/retrieve")
        if self.passages < 1:
            raise UserError(f"--passages must be 1 or more, not {self.passages}")


class QADataset(RLDataset):
    """Rows of questions."""

    def __getitem__(self, index: int) -> Sample:
        row = dict(self.rows[index])
        if not row.get("question") or not (row.get("answer") or row.get("answers")):
            raise UserError(f"--data {self.source}: row {index} needs question, and answer or answers")
        return Sample([{"role": "user", "content": PROMPT.format(row["question"])}], row)


def read_passages(folder: str) -> list[str]:
    """All texts below a folder. Raises UserError if there are none."""
    passages = []
    for file in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        text = file.read_text(encoding="utf-8", errors="replace")
        if file.suffix == ".jsonl":
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
            passages += [row.get("text") or row.get("contents") or "" for row in rows]
        else:
            passages += re.split(r"\n\s*\n", text)
    passages = [passage.strip() for passage in passages if passage.strip()]
    if not passages:
        raise UserError(f"--index {folder} has no texts")
    return passages


class Index:
    """Passages for a query, best first."""

    def __init__(self, where: str, count: int):
        self.where = where
        self.count = count
        self.is_remote = where.startswith(("http://", "https://"))
        if not self.is_remote:
            try:
                import bm25s  # an optional package
            except ImportError as error:
                raise UserError(f"--index requires bm25s ({error}): pip install bm25s") from error
            self.passages = read_passages(where)
            self.bm25 = bm25s.BM25()
            self.library = bm25s
            self.bm25.index(self.library.tokenize(self.passages, **QUIET), show_progress=False)

    def ask(self, query: str) -> list[str]:
        """Passages from a server."""
        body = json.dumps({"queries": [query], "topk": self.count, "return_scores": False}).encode()
        request = urllib.request.Request(self.where, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as response:
            (passages,) = json.load(response)["result"]
        return [passage.get("contents") or passage.get("text", "") for passage in passages]

    def search(self, query: str) -> list[str]:
        """At most `count` passages."""
        if self.is_remote:
            return self.ask(query)
        words = self.library.tokenize([query], **QUIET)
        count = min(self.count, len(self.passages))
        places, scores = self.bm25.retrieve(words, k=count, show_progress=False)
        return [self.passages[place] for place, score in zip(places[0], scores[0]) if score > 0]


def words_of(text: str) -> list[str]:
    """The words that count in a comparison."""
    return re.sub(r"\b(a|an|the)\b", " ", re.sub(r"[^\w\s]", "", text.lower())).split()


def exact_match(answer: str, golds: list[str]) -> float:
    """1 if the answer is one of them."""
    return float(any(words_of(answer) == words_of(gold) for gold in golds))


def f1(answer: str, golds: list[str]) -> float:
    """The best harmonic mean of precision and recall of words."""
    words = words_of(answer)
    best = 0.0
    for gold in map(words_of, golds):
        common = sum((Counter(words) & Counter(gold)).values())
        best = max(best, 2 * common / (len(words) + len(gold)) if common else 0.0)
    return best


def reward_fn(sample: Sample) -> float:
    """Exact match of the last <answer>."""
    golds = sample.row.get("answers") or [str(sample.row["answer"])]
    answers = re.findall(r"<answer>(.*?)</answer>", sample.turns[-1], re.DOTALL)
    sample.metrics["searches"] = float(len(sample.turns) - 1)
    sample.metrics["f1"] = f1(answers[-1], golds) if answers else 0.0
    return exact_match(answers[-1], golds) if answers else 0.0


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
        passages = await asyncio.to_thread(self.index.search, query[1].strip())
        shown = [f"({i}) {text[:1000]}" for i, text in enumerate(passages, 1)]
        return user_turn("\n".join(shown) or "Nothing was found.")


if __name__ == "__main__":
    main(SearchConfig, QADataset, reward_fn, trainer=SearchTrainer)
