"""The `mdcp` command: one module per subcommand, imported only when it is asked for."""
