"""The capstone: the homework in one file, graded by itself.

The learner's `hw_fsdp.py` supplies all of FSDP except streams and collectives. It is compared with torch's FSDP2.

    rules      what the file may use and has to define
    cases      the models that it is tried on
    witness    sees every operator: memory alive, and who reads it when
    runs       what ranks do with it
    judges     the tasks and the bonuses
"""
