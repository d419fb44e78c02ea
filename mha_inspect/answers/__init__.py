"""Answer what is asked: trace, params, diff, compare-heads."""
