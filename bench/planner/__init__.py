"""`lamina plan`: the planner's command line, its pictures, and its check against real runs."""
