"""Scaling studies: `hpctrain scale` trains one recipe on several sizes and reports how it scales.

    sizes x repeats    trial_recipe.py        trials: one recipe per size, made for timing
    folder             study.py               study.json, a folder per trial: those there are done
    trials             trials/ on this machine, on a netlab, as jobs of Slurm
    files -> numbers   collect.py, table of   summary.json and metrics.jsonl of each trial, no more
                       numbers: results.py
    laws, forecast     statistics.py, forecast.py   Amdahl, Gustafson; the alpha-beta model beyond
    display            output/             live_table.py while trials run; tables, plots, page

Everything after the trials reads files only; so a study that was stopped anywhere goes on when it
is called again, and the trials measured so far are drawn.
"""
