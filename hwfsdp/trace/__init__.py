"""A run recorded, held against closed forms, compared with another.

steps            which optimizer steps to record
capture          what runs on each rank: a script as torchrun would run it, recorded
runs             ranks started, their logs put together
findings         a log in numbers: what moved, what should have, what was hidden
comparison       two logs side by side
tables           how text is laid out
findings_text    findings as text and JSON
comparison_text  a comparison as text and JSON
export           a log in other formats
commands         what the verbs of `hwfsdp trace` do
"""
