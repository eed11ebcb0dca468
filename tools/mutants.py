"""Random mutants: would the tests notice a small mistake anywhere in the code?

    pip install -r tools/mutants.txt
    python -m tools.mutants FOLDER map                  # once: which test reaches which line
    python -m tools.mutants FOLDER run --number 300     # resumes where it was stopped
    python -m tools.mutants FOLDER report

cosmic-ray makes the mutants, in copies of the last commit under FOLDER, and keeps their results there. Places
are drawn with --seed, from each file in proportion to how many it has, and then one mutation at each. A
mutant gets only the tests that reached its statement, in pytest's process or in one that a test started; what
a fixture of several tests reached counts for each of them. A statement that runs at import gets all tests
that reach its file.

--stage slow and --stage sglang (in the environment of .ci/sglang_cpu/install) have maps of their own, and run
what survived the stages before.
"""

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

STAGES = {"fast": "not slow and not sglang", "slow": "slow and not sglang", "sglang": "sglang"}
FILES = ["train.py", "rewards.py", "extras/*.py", "recipes/*.py"]
CONTEXT = "MUTANTS_CONTEXT"  # of a process: the test or fixture that started it
MUTANT = "MUTANTS_MUTANT"  # of a process: the mutant that it runs
COVERAGE = """[run]
data_file = {folder}/coverage
include = {files}
parallel = true
relative_files = true
sigterm = true
patch =
    _exit
    fork
context = ${{MUTANTS_CONTEXT-}}
"""


# ---- A plugin of pytest that makes the map ----------------------------------------------------------------
class Plugin:
    """Tells coverage which test or fixture is running; notes the contexts and the seconds of each test."""

    def __init__(self, file: Path):
        self.file = file
        self.tests = {}

    def enter(self, context: str):
        """What runs from now on, in this process or in those that it starts, runs for a test or fixture."""
        from coverage import Coverage

        Coverage.current().switch_context(context)
        os.environ[CONTEXT] = context
        for name in [name for name in sys.modules if name.startswith("tests.")]:
            for value in vars(sys.modules[name]).values():
                if isinstance(value, dict) and "PATH" in value:  # a copy of the environment
                    value[CONTEXT] = context

    def pytest_runtest_setup(self, item):
        fixtures = [found[-1] for found in item._fixtureinfo.name2fixturedefs.values()]
        shared = [fixture.argname for fixture in fixtures if fixture.scope != "function"]
        self.tests[item.nodeid] = {"seconds": 0.0, "contexts": [item.nodeid, *shared]}
        self.enter(item.nodeid)

    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope != "function":
            self.enter(fixturedef.argname)

    def pytest_runtest_call(self, item):
        self.enter(item.nodeid)

    def pytest_runtest_logreport(self, report):
        if report.nodeid in self.tests:
            self.tests[report.nodeid]["seconds"] += report.duration

    def pytest_sessionfinish(self):
        self.file.write_text(json.dumps(self.tests))


def pytest_configure(config):
    """Called by pytest for `-p tools.mutants`."""
    config.pluginmanager.register(Plugin(Path(os.environ["MUTANTS_TESTS"])))


# ---- The map ----------------------------------------------------------------------------------------------
def copy_of(folder: Path, name: str) -> Path:
    """A copy of the repository's last commit."""
    copy = folder / name
    if not copy.exists():
        subprocess.run(["git", "clone", "-q", ".", copy], check=True)
    return copy


def make_map(folder: Path, stage: str):
    """Runs all tests of a stage under coverage, and keeps which of them reached which line."""
    from coverage import CoverageData

    results = folder / stage
    results.mkdir(parents=True)
    settings = results / "coveragerc"
    settings.write_text(COVERAGE.format(folder=results, files=", ".join(FILES)))
    tests = results / "tests.json"
    environment = {"COVERAGE_PROCESS_START": str(settings), "MUTANTS_TESTS": str(tests)}
    pytest = ["-m", "pytest", "-q", "-p", "tools.mutants", "-m", STAGES[stage]]
    coverage = [sys.executable, "-m", "coverage"]
    options = {"cwd": copy_of(folder, "copy0"), "env": os.environ | environment}
    done = subprocess.run([*coverage, "run", f"--rcfile={settings}", *pytest], **options)
    if done.returncode:
        print(
            "Some tests fail under coverage. Make sure that they pass without it: mutants will get them, too."
        )
    subprocess.run([*coverage, "combine", "-q", f"--rcfile={settings}"], **options, check=True)
    data = CoverageData(results / "coverage")
    data.read()
    reached = {file: data.contexts_by_lineno(file) for file in data.measured_files()}
    (results / "map.json").write_text(
        json.dumps({"reached": reached, "tests": json.loads(tests.read_text())})
    )


class Map:
    """Which tests reach which statement."""

    def __init__(self, folder: Path, stage: str):
        content = json.loads((folder / stage / "map.json").read_text())
        self.copy = folder / "copy0"
        self.tests = content["tests"]
        self.contexts = {
            file: {int(line): set(contexts) for line, contexts in lines.items()}
            for file, lines in content["reached"].items()
        }

    def statement(self, file: str, line: int) -> range:
        """The lines of the smallest statement around a line, without the statements inside it."""
        found = range(line, line + 1)
        for node in ast.walk(ast.parse((self.copy / file).read_text())):
            if isinstance(node, ast.stmt) and node.lineno <= line <= node.end_lineno:
                body = getattr(node, "body", [])
                end = body[0].lineno if body else node.end_lineno + 1
                found = range(node.lineno, max(end, node.lineno + 1)) if line < end else found
        return found

    def reaching(self, file: str, line: int) -> list[str]:
        """The tests that reach the statement of a line, the fastest first."""
        lines = self.contexts.get(file, {})
        contexts = set().union(*(lines.get(one, ()) for one in self.statement(file, line)))
        if "" in contexts:  # at import
            contexts = set().union(*lines.values())
        tests = [name for name, test in self.tests.items() if contexts & set(test["contexts"])]
        return sorted(tests, key=lambda name: self.tests[name]["seconds"])


# ---- The mutants ------------------------------------------------------------------------------------------
def draw(items: list, number: int, seed: int) -> list:
    """So many of cosmic-ray's work items: at most one per place, and files in proportion to their places."""
    generator = random.Random(seed)
    places = defaultdict(list)
    for item in items:
        (mutation,) = item.mutations
        places[str(mutation.module_path), mutation.start_pos].append(item)
    files = defaultdict(list)
    for file, start in sorted(places):
        files[file].append(places[file, start])
    exact = {file: number * len(found) / len(places) for file, found in files.items()}
    shares = {file: int(share) for file, share in exact.items()}
    missing = number - sum(shares.values())
    for file in sorted(files, key=lambda file: shares[file] - exact[file])[:missing]:
        shares[file] += 1
    drawn = []
    for file, found in files.items():
        chosen = generator.sample(found, min(shares[file], len(found)))
        drawn += [generator.choice(mutations) for mutations in chosen]
    return drawn


def open_mutants(folder: Path, stage: str, number: int, seed: int):
    """The stage's database of mutants: drawn if it is the first stage, else those that survived the last."""
    from cosmic_ray.commands import init
    from cosmic_ray.work_db import WorkDB

    file = folder / f"{stage}-{number}-{seed}.sqlite"
    exists = file.exists()
    database = WorkDB(file, WorkDB.Mode.create)
    if exists:
        return database
    earlier = [folder / f"{name}-{number}-{seed}.sqlite" for name in STAGES]
    earlier = [path for path in earlier[: list(STAGES).index(stage)] if path.exists()]
    if earlier:
        before = WorkDB(earlier[-1], WorkDB.Mode.open)
        survivors = {job for job, result in before.results if not result.is_killed}
        drawn = [item for item in before.work_items if item.job_id in survivors]
    else:
        paths = sorted(path for pattern in FILES for path in Path().glob(pattern))
        init(paths, database, {})
        drawn = draw(list(database.work_items), number, seed)
        database.clear()
    database.add_work_items(drawn)
    return database


def end_processes(mutant: str):
    """Kills what a mutant's tests left behind."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MUTANT}={mutant}".encode() in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except (PermissionError, ProcessLookupError, FileNotFoundError):
            pass  # of another user, or gone


def run_mutant(copy: Path, item, tests: list[str], seconds: float):
    """cosmic-ray's result of a mutant."""
    from cosmic_ray.mutating import mutate_and_test

    os.chdir(copy)
    os.environ[MUTANT] = item.job_id
    names = Path("selected.txt")
    names.write_text("\n".join(tests))
    limit = 120 + 5 * seconds  # beyond it, the mutant hangs and counts as killed
    result = mutate_and_test(item.mutations, f"{sys.executable} -m pytest -xq -m '' @{names}", limit)
    end_processes(item.job_id)
    return result


def run_mutants(folder: Path, stage: str, number: int, seed: int, workers: int):
    """Runs the mutants of a stage that have no result yet."""
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    reach = Map(folder, stage)
    database = open_mutants(folder, stage, number, seed)
    free = [copy_of(folder, f"copy{i}") for i in range(workers)]
    pending = list(database.pending_work_items)
    running = {}
    with ProcessPoolExecutor(workers) as pool:
        while pending or running:
            while pending and free:
                item = pending.pop(0)
                (mutation,) = item.mutations
                tests = reach.reaching(str(mutation.module_path), mutation.start_pos[0])
                if not tests:
                    nobody = {"output": "no test reaches it", "test_outcome": TestOutcome.SURVIVED}
                    database.set_result(item.job_id, WorkResult(WorkerOutcome.NO_TEST, **nobody))
                    continue
                seconds = sum(reach.tests[test]["seconds"] for test in tests)
                copy = free.pop()
                running[pool.submit(run_mutant, copy, item, tests, seconds)] = item, copy
            for done in as_completed(running):
                item, copy = running.pop(done)
                free.append(copy)
                database.set_result(item.job_id, done.result())
                print(described(item), done.result().test_outcome.value, f"({len(pending)} left)", flush=True)
                break


# ---- The report -------------------------------------------------------------------------------------------
def described(item) -> str:
    (mutation,) = item.mutations
    return f"{mutation.module_path}:{mutation.start_pos[0]} {mutation.operator_name.removeprefix('core/')}"


def report(folder: Path, stage: str, number: int, seed: int):
    """Prints the score of each file and of all, and what survived."""
    database = open_mutants(folder, stage, number, seed)
    items = {item.job_id: item for item in database.work_items}
    killed, total = Counter(), Counter()
    for job, result in database.results:
        item = items[job]
        for name in (str(item.mutations[0].module_path), "all"):
            total[name] += 1
            killed[name] += result.is_killed
        if not result.is_killed:
            print(f"\n{described(item)}: {result.diff or result.output}")
    print(f"\n{'file':32} {'killed':>6} {'of':>4}")
    for name in sorted(total, key=lambda name: (name == "all", name)):
        print(f"{name:32} {killed[name]:6} {total[name]:4} {killed[name] / total[name]:5.0%}")


def main():
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder, and later the same")
    parser.add_argument("action", choices=["map", "run", "report"])
    parser.add_argument("--stage", choices=list(STAGES), default="fast")
    parser.add_argument("--number", type=int, default=300, help="mutants to draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2, help="mutants at a time")
    flags = parser.parse_args()
    folder = flags.folder.resolve()
    os.environ["OMP_NUM_THREADS"] = "1"
    sample = (flags.number, flags.seed)
    if flags.action == "map":
        shutil.rmtree(folder / flags.stage, ignore_errors=True)
        make_map(folder, flags.stage)
    elif flags.action == "run":
        run_mutants(folder, flags.stage, *sample, flags.workers)
    else:
        report(folder, flags.stage, *sample)


if __name__ == "__main__":
    main()
