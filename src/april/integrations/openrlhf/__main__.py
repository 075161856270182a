from april.integrations.openrlhf import main

if __name__ == "__main__":
    main()
