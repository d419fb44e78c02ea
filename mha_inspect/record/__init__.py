"""Run a subject once and write down what it dispatches."""
