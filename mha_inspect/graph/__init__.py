"""Follow every dimension through a recording, and find the attentions in it."""
