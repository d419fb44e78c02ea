"""Answer the commands: trace, check, params, diff, compare-heads."""
