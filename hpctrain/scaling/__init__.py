"""Scaling studies: `hpctrain scale` trains one recipe on several sizes and tells how it scales.

    sizes x repeats    sizes.py, changes.py   what is run: one recipe per size, made for timing
    folder             study.py               study.json, a folder per trial: what is there, is done
    trials             places.py, conduct.py  on this machine, on a netlab, as jobs of Slurm
    files -> numbers   collect.py, table of   summary.json and metrics.jsonl of each trial, no more
                       numbers: results.py
    laws, forecast     laws.py, forecast.py   Amdahl, Gustafson; the alpha-beta model beyond
    what people see    board.py, teller.py while trials run; show.py, plots.py, page.py of results

Everything after the trials reads files only; so a study that was stopped anywhere goes on when it
is called again, and what is there is drawn.
"""
