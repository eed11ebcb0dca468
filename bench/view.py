"""How responsive is the page of samples? Loading, filtering, sorting and recolouring in a real browser.

    python -m bench.view --run RUN [--rounds 9] [--chromium /usr/bin/chromium]

RUN is the --output_dir of a run of train.py with about a thousand samples. It requires Chromium and
`pip install playwright`. Each action runs inside the page, up to the layout of what it changed; loading lasts
from the start of the navigation to the load event. Prints medians and maxima in ms, and writes the numbers.
"""

import tempfile
from pathlib import Path
from statistics import median

from playwright.sync_api import sync_playwright

from bench.measure import options, show, write
from tools.view import write_view

LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"
TIMED = """([id, value, event]) => {
    const start = performance.now(), element = document.getElementById(id);
    if (event === "click") element.click();
    else { element.value = value; element.dispatchEvent(new Event(event, { bubbles: true })); }
    document.body.offsetHeight;
    return performance.now() - start; }"""
ACTIONS = {  # name: (id, values in turn, event)
    "search": ("search", ["= 29 no", "answer", ""], "input"),
    "filter by reward": ("reward-from", ["0.5", ""], "input"),
    "sort": ("sort", ["length", "reward"], "input"),
    "recolour": ("column", ["logprobs", "entropy", "advantages"], "change"),
    "whole group": ("whole", [""], "click"),
}


def timed_actions(page, address: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each action, in every round."""
    times = {"load": []}
    for _ in range(rounds):
        page.goto(address)
        times["load"].append(page.evaluate(LOADED))
        for name, (element, values, event) in ACTIONS.items():
            for value in values:
                elapsed = page.evaluate(TIMED, [element, value, event])
                times.setdefault(name, []).append(elapsed)
    return times


def main():
    """Writes the page of a run, and measures it."""
    run = ("", "output folder of train.py")
    chromium = ("/usr/bin/chromium", "path of the browser")
    flags = options(__doc__, "view", run=run, chromium=chromium)
    errors = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as browsers:
        page_file = Path(folder) / "samples.html"
        summary = write_view(Path(flags.run), page_file).partition(", ")[2]
        browser = browsers.chromium.launch(executable_path=flags.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        times = timed_actions(page, page_file.as_uri(), flags.rounds)
        browser.close()
    rows = []
    for name, found in times.items():
        rows.append({"action": name, "median_ms": median(found), "worst_ms": max(found)})
    show(rows)
    print(f"{summary}; messages and errors of the page: {errors or 'none'}")
    write(flags.output, page=summary, rows=rows, errors=errors)


if __name__ == "__main__":
    main()
