"""The pictures behind `bookkit.draw`, one module per kind."""
