from april.cli import main

main()
