"""The page of a run, or of several runs to compare: one HTML file that needs no other file.

`figures`, which draws the figures of `plots`, and `timeline` convert runs' records to data, `run_page` adds the samples and the
configuration, and `page` puts the data, the plot library and the scripts of assets/ into one file.
"""
