"""The store when the machine goes wrong: crashes, failing disks, lost files. Seeded; a failure prints its seed."""
