"""What the commands answer, as plain frozen data: no tensors, no torch, nothing that formats itself.

Renderers take these and nothing else. The field names are the keys of the JSON output.
"""
