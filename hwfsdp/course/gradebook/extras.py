"""Parts graded besides the exercises, with points of their own: the capstone, the lab.

Their graders are imported only when a submission has something for them. A course without their folders is graded all the
same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hwfsdp.course.grade import Options
from hwfsdp.course.gradebook.layout import EXTRAS
from hwfsdp.course.manifest import Course
from hwfsdp.course.verdict import OnCheck

if TYPE_CHECKING:
    from hwfsdp.course.capstone.grading import HomeworkGrade
    from hwfsdp.course.lab.grading import LabGrade


def available(course: Course) -> list[str]:
    """The names of the extras that this course has."""
    return [name for name in EXTRAS if (course.root / "exercises" / name).is_dir()]


def grade_extra(
    name: str, folder: Path, course: Course, options: Options, on_check: OnCheck
) -> HomeworkGrade | LabGrade:
    """Grade one extra in the folder of a submission.

    Raises:
        Exception: whatever its grader raises.
    """
    if name == "lab":
        from hwfsdp.course.lab.grading import grade_lab

        return grade_lab(folder, course)
    from hwfsdp.course.capstone.grading import grade_capstone

    return grade_capstone(folder, course, options, on_check)
