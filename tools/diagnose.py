"""A sentence a step on what its numbers mean, and what to change where they are bad.

`Diagnosis` remembers the first step and the range of rewards seen so far; it knows the flags only as a dictionary.
"""
TRUNCATED, CLIPPED, COLLAPSED = 0.3, 0.2, 0.2       # shares: of completions; of tokens; of the first step's entropy


class Diagnosis:
    """Call it once a step, in order."""

    def __init__(self, config: dict, first: dict | None = None, low: float = float("inf"), high: float = -float("inf")):
        self.config, self.first, self.low, self.high = config, first, low, high

    def memory(self) -> dict:
        """What to begin with to go on from here."""
        return dict(first=self.first, low=self.low, high=self.high)

    def __call__(self, record: dict[str, float], samples: list) -> str:
        """The sentences for a step, from its metrics and its samples, group by group."""
        self.first = self.first or record
        self.low = min(self.low, *(sample.reward for sample in samples))
        self.high = max(self.high, *(sample.reward for sample in samples))
        counts = self.groups(samples)
        said = [self.failures(samples), self.signal(counts), self.on_policy(record), self.truncation(record),
                self.clipping(record), self.collapse(record, counts)]
        return " ".join(filter(None, said))

    def failures(self, samples: list) -> str | None:
        """Samples that could not be judged."""
        failures = [sample.failure for sample in samples if getattr(sample, "failure", "")]
        if failures:
            return f"{len(failures)} samples failed, and their groups were left out, the first as: {failures[0]}."

    def groups(self, samples: list) -> dict[str, int]:
        """How many groups there are by what their rewards say."""
        size, counts = self.config["group_size"], dict.fromkeys(("teach", "right", "wrong", "alike"), 0)
        for i in range(0, len(samples), size):
            rewards = {sample.reward for sample in samples[i:i + size]}
            kind = "teach" if len(rewards) > 1 else "alike"
            if kind == "alike" and self.low < self.high:
                kind = {self.high: "right", self.low: "wrong"}.get(rewards.pop(), kind)
            counts[kind] += 1
        return counts

    def signal(self, counts: dict[str, int]) -> str | None:
        """How many groups carry a signal, and why the others do not."""
        if self.config["baseline"] == "none":
            return None         # then a group is not what a return is compared with
        reasons = {"right": "all right", "wrong": "all wrong", "alike": "all alike"}
        others = [f"{counts[kind]} {text}" for kind, text in reasons.items() if counts[kind]]
        said = ", ".join([f"{counts['teach']} of {sum(counts.values())} groups teach", *others]) + "."
        if counts["teach"]:
            return said
        cure = "harder" if counts["right"] > counts["wrong"] else "easier"
        return f"{said} Nothing is learned from such a step: take {cure} prompts, or raise --group_size."

    def on_policy(self, record: dict[str, float]) -> str | None:
        """What everyone asks at the first step."""
        alone = self.config["updates_per_step"] == 1 and not self.config["kl_coef"]
        if record is self.first and alone and self.config["surrogate"] == "clip" and abs(record["loss"]) < 1e-3:
            return ("A loss near 0 is right: before the update each ratio is 1, and the advantages of a group sum to "
                    "0. The gradient is not 0; watch the reward.")

    def truncation(self, record: dict[str, float]) -> str | None:
        """Completions that the limit cut off."""
        if record["truncated"] > TRUNCATED:
            return (f"{record['truncated']:.0%} of the completions were cut off: raise --max_new_tokens, or look in "
                    "samples.jsonl at what never ends.")

    def clipping(self, record: dict[str, float]) -> str | None:
        """Off-policy updates that the clip holds back. A ratio of whole sequences is cut often, and should be."""
        if record["clip_fraction"] > CLIPPED and self.config["ratio"] == "token":
            return f"The clip cut {record['clip_fraction']:.0%} of the tokens off: lower --lr or --updates_per_step."

    def collapse(self, record: dict[str, float], counts: dict[str, int]) -> str | None:
        """Little entropy is fine where the task is solved, and the end of learning where it is not."""
        share = record["entropy"] / (self.first["entropy"] or 1)
        if share < COLLAPSED and counts["wrong"] + counts["alike"] > sum(counts.values()) / 2:
            return (f"Entropy is down to {share:.0%} of the first step's, and most groups are alike without being "
                    "right: lower --lr, or raise --clip_high, --entropy_coef or --temperature.")
