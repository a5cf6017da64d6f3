"""Words and tables for people: shared by the settings, the commands and what groups print."""
