"""The command line: it parses, calls one public function, and renders. Nothing imports it, and it imports no torch."""
