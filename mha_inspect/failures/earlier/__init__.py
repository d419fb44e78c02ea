"""What an earlier line did that the failing call only shows: read from the recording, before the call is edited."""
