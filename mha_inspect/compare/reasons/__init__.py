"""Why a stage of two runs differs, one reason a file; `why.REASONS` is the order in which they are asked."""
