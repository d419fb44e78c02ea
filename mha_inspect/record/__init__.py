"""Run a subject once and record the operations that it dispatches."""
