from april.commands.main import main

main()
