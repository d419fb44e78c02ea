"""Define the answers of the commands as frozen dataclasses of plain data, without torch.

The renderers take only these. The field names are the keys of the JSON output.
"""
