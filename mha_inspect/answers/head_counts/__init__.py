"""What compare-heads measures of each head count."""
