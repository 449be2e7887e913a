"""The command line: one lazily imported module per subcommand.

A subcommand's module has `configure(parser)`, which adds its options, and
`run(arguments)`, which does the work and returns the exit code.

Source: appendix A4, "The command line".
"""
