mod cases;
mod hostile;
mod world;
