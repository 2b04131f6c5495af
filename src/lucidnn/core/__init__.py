"""The machine: problems, engines, choice, plans. It knows no operation and no kernel, and loads no framework itself.

To read: `descriptor`, `operation`, `problem` (what is asked), `target` (for which hardware), `engine`, `registry` (who
can answer), `heuristics`, `timing`, `store` (how good the answers are), `plan` (the choice and the launch).
"""
