"""The student's edition works: compiled code fills the holes that you have not filled yet.

`hwfsdp release` gives this file to students. The instructor's tree has nothing to test here: `tests/course/test_release.py` runs it in
an edition.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hwfsdp import fully_shard, launch
from hwfsdp.course.grade import grade
from hwfsdp.course.manifest import Exercise, find_course
from hwfsdp.course.submission import starter

bodies = pytest.importorskip("hwfsdp.bodies", reason="not a student's edition")
COURSE = find_course(Path(__file__))


def _train() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    for layer in (*model, model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        loss = model(torch.ones(2, 5)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_works_before_any_exercise_is_written() -> None:
    one, two = launch(_train, 2, timeout=60)
    assert one == two and one[-1] < one[0]


@pytest.mark.parametrize("exercise", COURSE.exercises, ids=lambda e: e.directory)
def test_a_starter_is_not_started(exercise: Exercise, tmp_path: Path) -> None:
    (tmp_path / exercise.file_name).write_text(starter(exercise))
    assert grade(exercise, tmp_path, COURSE).status == "not_started"


def test_the_package_has_holes_in_its_text_and_bodies_for_all_of_them() -> None:
    for exercise in COURSE.exercises:
        for place in exercise.places:
            assert (bodies.FOLDER / f"{place.module}-{place.name}{bodies.SUFFIX}").exists()


def test_the_command_lists_the_exercises() -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "hwfsdp", "list", "--json"], capture_output=True, text=True, check=True
    )
    assert [row["exercise"] for row in json.loads(listed.stdout)] == [e.number for e in COURSE.exercises]
