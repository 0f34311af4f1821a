"""The page of a run, or of several to compare: report.html, which needs no other file, or a live page on loopback.

`figures`, `timeline`, `summary_table`, `settings` and `sample_groups` make data of a run's records, `run_page` collects them, `page` puts
the data, the plot library and the scripts of assets/ into one file, and `serve` answers a browser with the same page while a run goes on.
"""
