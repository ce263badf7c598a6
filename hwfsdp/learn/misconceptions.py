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
    "order-diverged": Misconception(
        "ranks run different collectives, or the same ones in different orders",
        "What does this rank know that the other does not, and does the order depend on it?",
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
    "replicated": Misconception(
        "every rank keeps the whole (this is DDP)",
        "Which part of the whole does this rank need once the step is over?",
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
    "wrong-state": Misconception(
        "the parameter is not in the state that it says it is in",
        "What does the table of states ask of this one?",
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
    "wrong-mesh": Misconception(
        "parameters are resharded over other ranks than asked for",
        "Over how many ranks is this group to be sharded between forward and backward, and who holds that mesh?",
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
    "prefetched-too-early": Misconception(
        "the gather of another group goes ahead of this group's own",
        "Which of the two gathers does compute wait for first?",
    ),
    "no-overlap": Misconception(
        "communication is waited for as soon as it is started",
        "What could be computed while these bytes travel?",
    ),
    "unbounded-prefetch": Misconception(
        "more is gathered ahead than one group", "How many groups are whole, or on their way, at that moment?"
    ),
    "prefetched-too-late": Misconception(
        "the next gather is started later than it could be",
        "What does this rank do between the wait and compute?",
    ),
    "order-not-noted": Misconception(
        "the order of forwards is not what ran", "How does backward know which group comes next?"
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
    "not-announced": Misconception(
        "nobody is told of gradients that are left unreduced",
        "What would warn an optimizer that steps before the last micro-batch?",
    ),
    "grad-lost": Misconception(
        "a gradient that was there is gone", "Which line assigns where it should add?"
    ),
    "grad-kept": Misconception("a gradient counts twice", "Who cleared the gradient that was already taken?"),
    "grad-replaced": Misconception(
        "the gradient lies in other memory than it should",
        "How many tensors of its size are alive at that moment, and which of them is needed?",
    ),
    "left-in-flight": Misconception(
        "a backward returns before its gradients are there",
        "Who waits for the reductions, and what has to be asked for, or noted, so that it happens?",
    ),
    "hook-not-called": Misconception(
        "hooks on a parameter's gradient are not called as they should be",
        "Who calls them, if it is not autograd that sets the gradient, and when is the gradient complete?",
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
    "master-not-fp32": Misconception(
        "the shard lost its precision", "Which tensor does the optimizer update, and in which dtype?"
    ),
    "cast-too-much": Misconception(
        "something was cast that is not a floating-point tensor", "What would token ids mean in bf16?"
    ),
    "overflowed": Misconception(
        "a sum left the range of its dtype",
        "How large may 8 gradients of 60,000 become in fp16 before the division?",
    ),
    "factor-ignored": Misconception(
        "the divisor is not the one that was asked for",
        "What takes the place of the number of ranks, if it is given?",
    ),
    "underflowed": Misconception(
        "numbers are divided before the sum until they vanish",
        "How small may an fp16 gradient be, before a division by all ranks makes it zero?",
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
    "share-twice": Misconception(
        "a rank's share is in the sum more than once", "Where did the partial sum pass that rank before?"
    ),
    "divided-every-step": Misconception(
        "the partial sum is divided on its way",
        "How often has the share of the first rank been divided at the end?",
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
    "sharded-too-much": Misconception(
        "a state is counted as sharded that this strategy keeps whole",
        "Which of the three states does this stage of ZeRO leave alone?",
    ),
    "shards-are-ranks": Misconception(
        "all ranks are taken for shards",
        "Over how many of the ranks is one copy of the parameters cut, and what do the others hold?",
    ),
    "nobody-to-send-to": Misconception(
        "bytes are counted that do not travel",
        "How many ranks are on that axis, and what would they exchange?",
    ),
    "update-not-gathered": Misconception(
        "updated parameters are not counted on their way back",
        "Each rank has updated its rows only: how do the others come by them before the next forward?",
    ),
    "sent-not-moved": Misconception(
        "what a rank sends is counted, not the tensor that the collective works on",
        "Which of the two does the docstring ask for, and which function turns one into the other?",
    ),
    "part-not-whole": Misconception(
        "a rank's part is counted instead of the whole tensor",
        "How large is the output of an all-gather, the input of a reduce-scatter?",
    ),
    "reduced-whole": Misconception(
        "replicas are thought to exchange whole gradients",
        "What has the reduce-scatter left on each rank by then?",
    ),
    "all-reduce-once": Misconception(
        "an all-reduce is counted as one walk around the ring",
        "After W - 1 steps, who has which sums, and who still wants them?",
    ),
    "rounded-too-early": Misconception(
        "bytes are rounded before they are multiplied", "What is 3 * (10 // 4), and what 3 * 10 // 4?"
    ),
    "wrong-axis": Misconception(
        "a collective is counted over the wrong axis of the mesh",
        "Which ranks hold different rows, and which the same?",
    ),
    "wrong-formula": Misconception(
        "the formula counts something else",
        "Count it by hand for one parameter and two ranks: what is left out?",
    ),
    "wrong-value": Misconception(
        "the result is not the right one", "At which element do the two first differ, and on which rank?"
    ),
}

FATAL = frozenset(
    {
        *("not-python", "missing", "wrong-signature", "stuck-in", "endless", "left-early", "died"),
        *("too-much-memory", "too-many-processes", "order-diverged"),
    }
)  # nothing of the exercise counts
