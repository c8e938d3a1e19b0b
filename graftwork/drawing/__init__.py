"""Pictures and pages: programs as graphs, what passes change, HTML that loads nothing."""
