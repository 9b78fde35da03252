"""Evaluation: the evaluator, results files, reports, comparisons, and the export of a trained run."""
