"""A class graded: submissions of every form, several at once, and a gradebook in the format that is asked for.

`submissions` reads what was handed in, `jobs` has it graded by processes of their own, `journal` keeps every result as soon
as it is there, `grading.grade_class` puts these together, `formats` writes gradebooks. It leaves out how one exercise is
graded: that is `hwfsdp.course.grade`.
"""
