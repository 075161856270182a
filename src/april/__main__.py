from april.commands.cli import main

main()
