"""What learners get wrong: each misconception with its sentence, and a question that leads on.

A sentence completes "it seems that …". The question never gives the answer. Checks name misconceptions by their ids;
`diagnose` recognizes the common ones.
"""

from __future__ import annotations

from typing import NamedTuple


class Misconception(NamedTuple):
    """What a learner seems to believe, or what seems to have happened, and a question that leads on."""

    sentence: str
    question: str


MISCONCEPTIONS: dict[str, Misconception] = {
    # --- the code does not run through ---
    "not-written": Misconception("a hole is still a hole", "Which of the TODOs is left?"),
    "not-python": Misconception(
        "the file is not Python", "What does Python say of this line, and of the one above it?"
    ),
    "missing": Misconception(
        "the file no longer defines a function that it has to",
        "Was it renamed, moved out of its class, or made into something else than a plain function?",
    ),
    "wrong-signature": Misconception(
        "the function cannot be called as the package calls it", "What are its parameters in the starter?"
    ),
    "crashed": Misconception(
        "the code raises", "What did the variables in that line hold, on that rank, at that moment?"
    ),
    "stuck-in": Misconception(
        "a rank waits for others that do not come",
        "Which condition lets one rank past what the others enter?",
    ),
    "endless": Misconception("the code does not come to an end", "What makes that loop stop?"),
    "left-early": Misconception(
        "a rank left before it was done", "Who else was waiting for that rank, and for what?"
    ),
    "died": Misconception("a rank died", "Which memory did it touch that was not, or no longer, there?"),
    "too-much-memory": Misconception(
        "a rank took more memory than it may", "How many bytes is that tensor, by its shape and dtype?"
    ),
    "too-many-processes": Misconception(
        "the code starts too many processes", "Why would a function of one rank start others?"
    ),
    "too-many-files": Misconception(
        "the code writes too many files, or too large ones",
        "What does a function of one rank need a file for?",
    ),
    "blocked": Misconception(
        "the code reaches for what is not its own",
        "Which tensors, groups and streams are given to your code to work with?",
    ),
    "order-diverged": Misconception(
        "ranks run different collectives, or the same ones in different orders",
        "What does this rank know that the other does not, and does the order depend on it?",
    ),
    "not-alone": Misconception(
        "the file uses what it is to supply itself",
        "Which two modules of the package may the file use, and what do they know of parameters?",
    ),
    # --- shards ---
    "wrong-rows": Misconception(
        "the rows are not those of this rank",
        "Which row comes first on rank r, if every rank before it has a full chunk?",
    ),
    "floor-instead-of-ceil": Misconception(
        "the remainder is left out of the chunk's length",
        "Who holds the last rows, when n is not a multiple of W?",
    ),
    "float-for-integer": Misconception(
        "integers go through floats, which are not exact for large integers",
        "What have float(2**53) and float(2**53 + 1) in common?",
    ),
    "spread-evenly": Misconception(
        "the remainder is spread over the first ranks", "How does torch.chunk cut 5 rows for 4 ranks?"
    ),
    "past-the-end": Misconception(
        "a chunk reaches past the last row",
        "With 5 rows for 4 ranks: where does the chunk of rank 3 begin, and end?",
    ),
    "empty-at-zero": Misconception(
        "an empty shard starts where a real one does", "Which start can no rank with rows have?"
    ),
    "padding-dropped": Misconception(
        "shards are not padded to a full chunk",
        "What do collectives want of the sizes that ranks contribute?",
    ),
    "padding-leaked": Misconception(
        "padding is taken for rows", "Which elements of a padded chunk belong to the parameter?"
    ),
    "padded-always": Misconception(
        "rows are padded although they divide", "How many rows are missing to a multiple of W, when n is one?"
    ),
    "padding-not-zero": Misconception(
        "padding is whatever was in memory", "Who wrote the elements that are no rows of this rank?"
    ),
    "caught-up": Misconception(
        "this station is the course's work, so its points are forgone",
        "What would you write differently?",
    ),
    "replicated": Misconception(
        "every rank keeps the whole (this is DDP)",
        "Which part of the whole does this rank need once the step is over?",
    ),
    "aliased": Misconception(
        "what is to have memory of its own is a view of something else",
        "Who writes to that memory, and who reads it without knowing?",
    ),
    "not-a-view": Misconception(
        "the rows are a copy of what is gathered, not a part of it",
        "After an optimizer step on the rows: does the next gather send the old values or the new ones?",
    ),
    "wrong-placement": Misconception(
        "the DTensor does not say how it is cut",
        "What do a state dict and an optimizer read off the placements?",
    ),
    "not-registered": Misconception(
        "the modules have another parameter than they should",
        "Where does a module's forward find its weight?",
    ),
    "untied": Misconception(
        "a tied parameter is not the same at all its places",
        "At how many places is a tied parameter registered, and as how many objects?",
    ),
    "flag-not-followed": Misconception(
        "the parameter has another requires_grad than the user set",
        "On which of the two parameters does a user set requires_grad, and when may that happen?",
    ),
    "wrong-device": Misconception(
        "memory is on another device than it should be",
        "On which device does a shard spend its life, if offloaded?",
    ),
    # --- shards of shards ---
    "wrong-order-of-cuts": Misconception(
        "cuts are made in another order than the placements say",
        "Who had cut the tensor already when FSDP was called, and how do placements say so?",
    ),
    "wrong-split-factor": Misconception(
        "a split factor is not the number of pieces that are there when its mesh dim cuts",
        "Into how many pieces have the axes on the right cut this tensor dim by then?",
    ),
    "counted-as-cut": Misconception(
        "an axis counts as a cut that does not cut this tensor dim",
        "Which placements cut at all, and which tensor dim does each of them cut?",
    ),
    "stripes-not-boxes": Misconception(
        "a rank is given a stripe of each piece, and these are cut again",
        "With 7 rows, cut for tp 2 and then for fsdp 3: which rows has the last rank of fsdp, of each tp?",
    ),
    "evenness-assumed": Misconception(
        "chunks are taken to be equally long",
        "How long are the pieces of 4 rows for 3 ranks, and of the 3 rows beside them?",
    ),
    "wrong-axis-order": Misconception(
        "placements stand at other axes than their own",
        "Which axes come first in the mesh of both, those of FSDP or those that the parameter lay on before?",
    ),
    "wrong-replica": Misconception(
        "another replica counts than the first",
        "Which coordinates hold the same box, and which of them comes first?",
    ),
    # --- a start without weights ---
    "seed-per-rank": Misconception(
        "numbers depend on the rank that draws them, or on how many ranks there are",
        "What does a row know of itself that is the same on 1 rank and on 4?",
    ),
    "one-sequence": Misconception(
        "rows are drawn one after the other from one generator",
        "How many numbers has this rank drawn before that row, and how many would it have drawn on fewer ranks?",
    ),
    "seeds-collide": Misconception(
        "different rows are drawn from the same seed",
        "Which two of seed, name and row number can be changed so that the generator starts as before?",
    ),
    "hash-differs": Misconception(
        "seeds differ from one process to the next",
        "What does hash('weight') print if Python is started twice?",
    ),
    "global-generator": Misconception(
        "the generator of the whole process is used, or disturbed",
        "What else draws from torch's default generator, and what does it draw afterwards?",
    ),
    "drawn-in-wrong-dtype": Misconception(
        "rows are drawn in another dtype than the parameter's",
        "Does normal_ give the same numbers in bf16 as in fp32, rounded?",
    ),
    "more-than-a-row": Misconception(
        "more than one row is in memory besides the shard",
        "How many rows does anyone look at, at the same time?",
    ),
    "copied-anyway": Misconception(
        "rows are copied that could stay where they are",
        "What is wrong with the memory that the rows are in already?",
    ),
    "row-in-part": Misconception(
        "a part of a row is drawn in place of the row",
        "If a rank has half of each row: which numbers does the other half get, and which would it get on one rank?",
    ),
    "not-initialized": Misconception(
        "a parameter keeps what happened to be in its memory",
        "Which parameters of a model are no DTensors, or not sharded at the moment, and who fills them?",
    ),
    "initialized-twice": Misconception(
        "a parameter is initialized once more, by another of its names",
        "How many names has a tied parameter, and which of them does it have if every parameter is met once?",
    ),
    "resharded-too-late": Misconception(
        "parameters are filled before their shards are registered",
        "What does a forward leave registered, and what becomes of it when its group is resharded?",
    ),
    "rows-of-others": Misconception(
        "init is called for rows that are not this rank's",
        "How many rows of each parameter does this rank hold, and what should a rank without any do?",
    ),
    # --- memory ---
    "not-allocated": Misconception(
        "memory that is about to be written is not there", "How many bytes has the storage at that moment?"
    ),
    "elements-for-bytes": Misconception(
        "elements are counted where bytes are meant", "How many bytes has one element of this dtype?"
    ),
    "not-freed": Misconception(
        "unsharded parameters are not freed after use", "Who gives the memory back, and when is it called?"
    ),
    "freed-too-early": Misconception(
        "memory is freed before it was used", "Who still reads it, and when is that over?"
    ),
    "read-while-freed": Misconception(
        "a weight is read while its memory is free",
        "Who still needs this weight at that moment, and who gave its memory back before?",
    ),
    "replaced-not-resized": Misconception(
        "a new tensor took the place of the old one",
        "Autograd saved the old one in forward: how does it come to see the memory again?",
    ),
    "grad-not-freed": Misconception(
        "whole gradients stay alive after they were reduced",
        "Who still refers to the gradient of the whole parameter?",
    ),
    "kept-alive": Misconception(
        "memory stays alive that nobody will read again",
        "Which attribute, list or closure still refers to it, and who is to read it there?",
    ),
    # --- schedule ---
    "never-resharded": Misconception(
        "parameters stay whole from forward to backward (this is ZeRO-2)",
        "How often is each group gathered in a step, if it is freed in between?",
    ),
    "resharded-anyway": Misconception(
        "parameters are freed where they are to stay", "What does None, or False, ask for here?"
    ),
    "gathered-again": Misconception(
        "parameters that are there are gathered once more",
        "How does a group know that it is whole, or about to be?",
    ),
    "used-before-wait": Misconception(
        "memory is read before its collective is known to be over",
        "Which stream has to wait for which, and where does it say so?",
    ),
    "not-gathered": Misconception(
        "parameters are computed with, or looked for, before they were gathered", "What comes before compute?"
    ),
    "not-prefetched": Misconception(
        "the gather of the next group is not started here", "What could travel while this group computes?"
    ),
    "no-overlap": Misconception(
        "communication is waited for as soon as it is started",
        "What could be computed while these bytes travel?",
    ),
    "unbounded-prefetch": Misconception(
        "more is gathered ahead than one group", "How many groups are whole, or on their way, at that moment?"
    ),
    "unbounded-reductions": Misconception(
        "more reductions are in flight than there may be",
        "How many buffers of gradients are alive at that moment, and which wait would free one?",
    ),
    "wrong-stream": Misconception(
        "work is issued on another stream than its own",
        "Which stream is current at that line, and which one would be held up by this work?",
    ),
    "guessed-wrong": Misconception(
        "another group is gathered ahead than the one to be expected",
        "What did the record say at this place, and is this the group that was there?",
    ),
    # --- gradients ---
    "summed-not-averaged": Misconception(
        "gradients are summed over the ranks, not averaged", "Of how many ranks' batches is the loss a mean?"
    ),
    "averaged-twice": Misconception(
        "gradients are divided by the number of ranks twice", "Who divides already: you, or the collective?"
    ),
    "accumulation-scaled": Misconception(
        "gradients are scaled by the number of micro-batches",
        "Which micro-batches took part in this gradient?",
    ),
    "not-reduced": Misconception(
        "gradients are not reduced over the ranks", "Whose batch does this gradient come from?"
    ),
    "reduced-too-often": Misconception(
        "gradients travel before the last micro-batch", "What does requires_gradient_sync switch off?"
    ),
    "update-not-seen": Misconception(
        "the optimizer's update is not in what is computed with",
        "Which memory does the optimizer write to, and which memory does the next gather read, and when?",
    ),
    "grad-lost": Misconception(
        "a gradient that was there is gone", "Which line assigns where it should add?"
    ),
    "grad-kept": Misconception("a gradient counts twice", "Who cleared the gradient that was already taken?"),
    "object-replaced": Misconception(
        "the parameter is another object than before",
        "Which object did the optimizer get when it was made, and does it ever hear of another one?",
    ),
    "grad-replaced": Misconception(
        "the gradient lies in other memory than it should",
        "How many tensors of its size are alive at that moment, and which of them is needed?",
    ),
    "left-in-flight": Misconception(
        "a backward returns before its gradients are there",
        "Who waits for the reductions, and what has to be asked for, or noted, so that it happens?",
    ),
    "reduced-in-wrong-dtype": Misconception(
        "gradients are reduced in another dtype than the policy's",
        "In which dtype do errors of a sum add up?",
    ),
    "gathered-in-wrong-dtype": Misconception(
        "parameters are gathered in another dtype than the policy's",
        "When are they cast: before they travel or after?",
    ),
    "wrong-dtype": Misconception(
        "a tensor is of another dtype than the policy asks for", "Which of the three dtypes is this tensor's?"
    ),
    "overflowed": Misconception(
        "a sum left the range of its dtype",
        "How large may 8 gradients of 60,000 become in fp16 before the division?",
    ),
    # --- communication ---
    "too-much-traffic": Misconception(
        "more bytes travel than have to", "How often does each block have to pass each link of the ring?"
    ),
    "too-little-traffic": Misconception(
        "fewer bytes travel than have to", "From whom did this rank get that block, then?"
    ),
    "wrong-neighbour": Misconception(
        "blocks go around the ring the wrong way",
        "From whom does a rank receive what it sends on in the next step?",
    ),
    "wrong-block": Misconception(
        "a block lies in the wrong place", "Whose block arrives at rank r in step s?"
    ),
    "block-missing": Misconception(
        "a block, or a rank's share of one, never arrives",
        "How many steps does a block take to pass every rank, and what does each rank add to it?",
    ),
    "averaged-not-summed": Misconception(
        "a mean is taken where a sum is asked for", "What does the argument `mean` say?"
    ),
    "not-a-ring": Misconception("blocks do not go around a ring", "Whom does a rank of a ring ever talk to?"),
    "wrong-group": Misconception(
        "it works for all ranks, but not for a group of some of them",
        "Which number has rank 3 in the group of ranks 1 and 3, and how many ranks has that?",
    ),
    "input-changed": Misconception(
        "the input is written to", "Whose memory is that, and who reads it afterwards?"
    ),
    "nobody-to-send-to": Misconception(
        "bytes are counted that do not travel",
        "How many ranks are on that axis, and what would they exchange?",
    ),
    "reduced-whole": Misconception(
        "replicas are thought to exchange whole gradients",
        "What has the reduce-scatter left on each rank by then?",
    ),
    # --- groups ---
    "claimed-twice": Misconception(
        "what belongs to one call of fully_shard already is claimed once more",
        "How do you know that a module was sharded before, and to whom does what is below it belong?",
    ),
    "one-by-one": Misconception(
        "parameters of a group travel one by one",
        "What does a collective cost that moves a single element, and how many of these are there now?",
    ),
    "bytes-for-numbers": Misconception(
        "bytes are taken for numbers",
        "What does the byte 64 say, if it is one of the four of an fp32 number?",
    ),
    # --- hybrid sharding ---
    "axes-swapped": Misconception(
        "the two axes of the mesh are taken for each other",
        "In a mesh (replicate, shard): in which coordinate do two ranks differ that hold the same rows?",
    ),
    "drifted": Misconception(
        "replicas hold the same rows, and go different ways",
        "Whose batches are in this gradient, and whose should be?",
    ),
    "partial-forgotten": Misconception(
        "gradients that were reduced in part are lost before they are reduced over the replicas",
        "Which parameters got a gradient in the last micro-batch, and which in the ones before?",
    ),
    # --- checkpoints ---
    "wrong-origin": Misconception(
        "an offset counts from another element than it should",
        "From which element does each of these boxes count: from the tensor's first, or from a part's?",
    ),
    "touching-not-shared": Misconception(
        "parts that only touch, or are far apart, are taken to share something",
        "How many elements do rows 2 to 4 and rows 4 to 6 have in common, the ends left out?",
    ),
    "parts-missing": Misconception(
        "a tensor with elements missing passes for whole",
        "How many elements do all parts have together, and how many the tensor?",
    ),
    "parts-overlap": Misconception(
        "parts that overlap pass for a whole",
        "Can parts have as many elements as the tensor, and still leave some out?",
    ),
    "fault-missed": Misconception(
        "parts pass that cannot be parts of this tensor",
        "How many numbers are in an offset, and how many in a shape, of a part of a tensor with two dims?",
    ),
    "good-parts-refused": Misconception(
        "parts that make up the tensor are refused", "Which element is missing, or there twice?"
    ),
    "replicas-differ": Misconception(
        "copies that differ are saved as if they were one",
        "Whose copy would the checkpoint hold, and who would know?",
    ),
    "holders-lost": Misconception(
        "a rank that has a part is not listed with it", "Which ranks could write this part?"
    ),
    "not-named": Misconception(
        "an error does not say what is wrong where", "What would you want to read, with a thousand tensors?"
    ),
    "rank-0-only": Misconception(
        "only what the first rank has is saved", "Where do the rows of the other ranks come from?"
    ),
    "same-world-only": Misconception(
        "a checkpoint is loaded by as many ranks as saved it, only",
        "Which saved parts does rank 0 of 2 need, if 3 ranks saved?",
    ),
    "rows-not-loaded": Misconception(
        "elements of the target are never read",
        "Which saved parts hold them, and at whose name do those stand?",
    ),
    "optimizer-forgotten": Misconception(
        "the optimizer's state is not loaded",
        "What does AdamW do in its next step, if its moments are zero?",
    ),
    "matched-by-place": Misconception(
        "values go to the tensor that comes at the same place, not to that of the same name",
        "Does a dict promise that another one has its keys in the same order?",
    ),
    "read-too-much": Misconception(
        "more is read than this rank has", "Which of these elements does this rank keep?"
    ),
    "not-committed": Misconception(
        "the save is there, but not whole, or does not count", "Which names does a load look up?"
    ),
    "not-atomic": Misconception(
        "there is a moment without any whole checkpoint",
        "Between which two operations is the old one gone, or half overwritten, and the new one not there yet?",
    ),
    "not-durable": Misconception(
        "the save counts before all of it is on the disk",
        "Which bytes, and which names, may a power cut take back at that moment?",
    ),
    "failed-save-counts": Misconception(
        "a save that failed counts nevertheless", "Who undoes the last step if the one after it fails?"
    ),
    "error-swallowed": Misconception("an error is swallowed", "Who would ever hear of it?"),
    "snapshot-aliased": Misconception(
        "the copy changes when training goes on",
        "Whose memory is that, and what does the optimizer do to it in the next step?",
    ),
    "staged-in-background": Misconception(
        "the copy is made while training goes on already",
        "Which values does a copy hold that is made while an optimizer steps?",
    ),
    "waits-for-write": Misconception(
        "training waits for the disk",
        "Which part of a save has to be over before the next step may change anything?",
    ),
    "saves-overlap": Misconception(
        "a save begins before the one before it has ended",
        "How many copies are in memory then, and in which order do the saves end?",
    ),
    "buffers-not-reused": Misconception(
        "memory is allocated for every copy", "Where is the memory of the last copy, and who still reads it?"
    ),
    "buffer-in-use": Misconception(
        "a copy is made into memory that somebody reads",
        "How do you know that nobody refers to that buffer any more, or has been given it in this very call?",
    ),
    "raised-again": Misconception(
        "an error that was raised already is raised again", "Who has heard of it, and where is that noted?"
    ),
    "raised-alone": Misconception(
        "an error of one rank's copy is raised there at once, and nobody tells the others",
        "What are the ranks waiting for whose copies were made?",
    ),
    "wrong-value": Misconception(
        "the result is not the right one", "At which element do the two first differ, and on which rank?"
    ),
}

FATAL = frozenset(
    {
        *("not-python", "missing", "wrong-signature", "stuck-in", "endless", "left-early", "died"),
        *("too-much-memory", "too-many-processes", "too-many-files", "blocked", "order-diverged"),
    }
)  # nothing of the exercise counts
