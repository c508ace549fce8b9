"""The archive: tables of everything the journals held, and the job that fills them."""
