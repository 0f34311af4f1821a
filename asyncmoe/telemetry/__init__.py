"""What a run shows: records in files, and everything that reads them.

Each file of the run directory has one writer. Readers (live view, TensorBoard, Prometheus, summary, report) only ever see the
files, so a run can be watched, or explained later, from another process.
"""
