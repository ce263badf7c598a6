"""The broken lab: scripts that train wrongly. Learners name the cause and the fix, and prove it with evidence.

`bugs` says what a bug is, `answers` reads what was handed in, `running` runs a script, `evidence` measures what it did,
`seals` keep the key, `grading` judges, `report` and `commands` say it, `workshop` writes the files.
"""

from hwfsdp.course.lab.grading import grade_lab

__all__ = ["grade_lab"]
