"""Rules for the settings of each framework: one module per framework, importable without the framework."""
