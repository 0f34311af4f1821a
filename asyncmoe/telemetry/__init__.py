"""Telemetry of a run: records in files, and their readers.

Each file of the run directory has one writer. Readers (terminal, TensorBoard, Prometheus, summary, report) use only the
files, so another process can watch a run or analyse it later.
"""
