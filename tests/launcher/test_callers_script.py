"""The caller's own script on ranks of `launch`: its classes and functions have the same names there, as under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import suites

SCRIPT = """
    import dataclasses, enum, functools, io, json, os, pickle, sys
    import torch
    from hwfsdp import RankError, launch

    print("top level", file=sys.stderr)

    @dataclasses.dataclass
    class Config:
        rate: float = 0.1

    class Kind(enum.Enum):
        GOOD = 1

    class Outer:
        class Inner:
            def __init__(self, value):
                self.value = value

            def __eq__(self, other):
                return type(other) is type(self) and other.value == self.value

        @staticmethod
        def make(value):
            return Outer.Inner(value)

    class OwnError(Exception):
        pass

    class Unmentioned(Config):
        pass

    @functools.lru_cache
    def cached(x):
        return Config(x)

    def through(value):
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def returned(config, many, inner):
        return config, many, inner, Kind.GOOD, [type(config), type(inner), Kind, through], setting

    def saved(config, many, inner):
        return [through(x) == x and type(through(x)) is type(x) for x in (config, many, inner, Kind.GOOD)]

    def unmentioned(data):
        found = pickle.loads(data)
        return [type(found).__name__, type(found).__module__, isinstance(found, Config)], found

    def everything(given, data, nested, reduced_to_a_name):
        more = unmentioned(data) if data else None
        return returned(*given), saved(*given), nested(5), reduced_to_a_name and reduced_to_a_name(7.0), more

    def fail():
        raise OwnError("no")

    def fail_in_a_lambda():
        raise_it = lambda: fail()
        return raise_it()

    def main():
        global setting
        setting = "below the guard"
        has_file = os.path.isfile(__file__)
        given = Config(2.0), [Config(3.0)], Outer.Inner(4)
        only_in_files = (pickle.dumps(Unmentioned(6.0)), Outer.make, cached) if has_file else (None, Outer.make, None)
        found = launch(everything, 2, given, *only_in_files)
        want = (*given, Kind.GOOD, [Config, Outer.Inner, Kind, through], setting)
        report = {"results": [rank[0] for rank in found] == [want] * 2}
        report["saved"] = [rank[1] for rank in found] == [[True] * 4] * 2
        report["nested"] = [rank[2] for rank in found] == [Outer.Inner(5)] * 2
        try:
            launch(fail_in_a_lambda, 2)
        except RankError as error:
            line = 'File "' + (os.path.abspath(__file__) if has_file else "<stdin>") + '", line '
            report["lines"] = error.traceback.count(line) >= 2
            report["cause"] = type(error.__cause__) is OwnError
        if has_file:
            report["reduced to a name"] = [rank[3] for rank in found] == [Config(7.0)] * 2
            for *_, (names, other) in found:
                right = names == ["Unmentioned", "__main__", True] and type(other) is Unmentioned
                report["unmentioned"] = right and report.get("unmentioned", True)
        print(json.dumps(report))

    if __name__ == "__main__":
        main()
"""


@pytest.mark.parametrize("how", ["script", suites.long("stdin")])
def test_the_scripts_own_classes_and_functions_work_on_ranks_as_in_the_script(
    how: str, tmp_path: Path
) -> None:
    text = textwrap.dedent(SCRIPT)
    (tmp_path / "script.py").write_text(text)
    what = "script.py" if how == "script" else "-"
    places = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, what],
        input=text if how == "stdin" else None,
        capture_output=True,
        text=True,
        timeout=200,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": places},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report == dict.fromkeys(report, True)
    assert len(report) == {"script": 7, "stdin": 5}[how]
