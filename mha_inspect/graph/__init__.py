"""Where every dimension of a recording goes, and the walks that find an attention in it."""
