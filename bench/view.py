"""How long does the page of samples keep one waiting? Loading, filtering, sorting and recolouring in a real browser.

    python -m bench.view --run RUN [--rounds 9] [--chromium /usr/bin/chromium]

RUN is a folder that train.py wrote, with a thousand samples or so. It needs Chromium and `pip install playwright`. Each
action runs in the page, up to the layout of what it changed; loading is from the start of the navigation to the load
event. Prints medians and the worst, in ms, and writes the numbers.
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
ACTIONS = {     # name: (id, values in turn, event)
    "search": ("search", ["= 29 no", "answer", ""], "input"),
    "filter by reward": ("reward-from", ["0.5", ""], "input"),
    "sort": ("sort", ["length", "reward"], "input"),
    "recolour": ("column", ["logprobs", "entropy", "advantages"], "change"),
    "whole group": ("whole", [""], "click")}


def main():
    """Writes the page of a run, and measures it."""
    flags = options(__doc__, "view", run=("", "folder of the run"), chromium=("/usr/bin/chromium", "the browser"))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as browsers:
        page_file, errors = Path(folder) / "samples.html", []
        said = write_view(Path(flags.run), page_file)
        browser = browsers.chromium.launch(executable_path=flags.chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.on("console", lambda message: errors.append(message.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        times = {"load": []}
        for _ in range(flags.rounds):
            page.goto(page_file.as_uri())
            times["load"].append(page.evaluate(LOADED))
            for name, (element, values, event) in ACTIONS.items():
                for value in values:
                    times.setdefault(name, []).append(page.evaluate(TIMED, [element, value, event]))
        browser.close()
    rows = [dict(action=name, median_ms=median(found), worst_ms=max(found)) for name, found in times.items()]
    show(rows)
    print(f"{said}; messages and errors of the page: {errors or 'none'}")
    write(flags.output, page=said, rows=rows, errors=errors)


if __name__ == "__main__":
    main()
