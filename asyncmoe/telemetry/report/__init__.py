"""The page of a run, or of several to compare: report.html, which needs no other file.

`figures`, which draws what `plots` names, and `timeline` make data of runs' records, `run_page` collects them with the samples and the
configuration, and `page` puts the data, the plot library and the scripts of assets/ into one file.
"""
