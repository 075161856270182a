from april.integrations.skyrl import main

if __name__ == "__main__":
    main()
