"""The command line: it parses, calls one public function, and renders. Nothing imports it, and it imports no torch.

Whatever it is asked and cannot do is raised as a `MhaInspectError`, mostly a `SpecError`, whose message is printed.
"""
