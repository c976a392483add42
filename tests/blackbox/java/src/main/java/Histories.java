import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedWriter;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Comparator;
import java.util.List;
import java.util.Random;
import java.util.TreeSet;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;

/** Makes histories, as work/work.go does: some clients do operations at random on a small log. */
public final class Histories {
  private static final int LAST_READS = 20;
  private static final String PRODUCER = "p";

  /** How often each operation comes, in the order of {@link Worker#doSomething}. */
  private static final int[][] SHAPES = {
    {35, 10, 15, 4, 20, 9, 5, 0, 2},
    {10, 45, 5, 2, 14, 20, 4, 0, 2},
    {5, 5, 50, 15, 14, 6, 3, 0, 6},
    {30, 15, 15, 5, 15, 8, 4, 4, 2},
  };

  /** Positions that any client of a history learned, in order. */
  private static final class Board {
    private final TreeSet<long[]> positions = new TreeSet<>(Arrays::compare);

    synchronized void note(String text) {
      if (!text.isEmpty()) {
        positions.add(Arrays.stream(text.split(":")).mapToLong(Long::parseLong).toArray());
      }
    }

    synchronized String some(Random random) {
      if (positions.isEmpty()) {
        return "";
      }
      return text(new ArrayList<>(positions).get(random.nextInt(positions.size())));
    }

    synchronized String last() {
      return positions.isEmpty() ? "" : text(positions.last());
    }

    private static String text(long[] position) {
      return position[0] + ":" + position[1] + ":" + position[2];
    }
  }

  /** One client, and what it does. */
  private static final class Worker {
    final LogClient client;
    private final int number;
    private final Random random;
    private final int[] weights;
    private final Board known;
    private int values;
    private ObjectNode claim;
    private long sequence;

    Worker(LogClient client, int number, Random random, int[] weights, Board known) {
      this.client = client;
      this.number = number;
      this.random = random;
      this.weights = weights;
      this.known = known;
    }

    Void run() throws Exception {
      for (int left = 4 + random.nextInt(4); left > 0; left--) {
        doSomething();
        if (random.nextInt(3) == 0) {
          Thread.sleep(random.nextInt(20));
        }
      }
      return null;
    }

    private void doSomething() throws Exception {
      int drawn = random.nextInt(Arrays.stream(weights).sum());
      int choice = 0;
      while (drawn >= weights[choice]) {
        drawn -= weights[choice++];
      }
      switch (choice) {
        case 0 -> note(client.append(with(1)));
        case 1 -> appendIf();
        case 2 -> produce();
        case 3 -> begin();
        case 4 -> read();
        case 5 -> note(client.tail());
        case 6 -> client.count();
        case 7 -> client.seal();
        default -> client.release();
      }
    }

    private void note(ObjectNode operation) {
      known.note(operation.path("last").asText(""));
      operation.path("rows").forEach(row -> known.note(row.get("position").asText()));
    }

    /** Returns an append of values that are in no other one of the history. */
    private ObjectNode with(int count) {
      ObjectNode operation = LogClient.operation("append");
      ArrayNode array = operation.putArray("values");
      for (int at = 0; at < count; at++) {
        array.add(number + "." + ++values);
      }
      return operation;
    }

    private void appendIf() throws Exception {
      int drawn = random.nextInt(10);
      String expected = drawn < 8 ? known.last() : drawn < 9 ? known.some(random) : "";
      ObjectNode operation = with(1 + random.nextInt(3));
      operation.put("conditional", true).put("expected", expected);
      if (claim != null && random.nextInt(3) == 0) {
        settle(operation);
      } else {
        note(client.append(operation));
      }
    }

    /** Appends as the incarnation that this client began last, whoever has begun one since. */
    private void produce() throws Exception {
      if (claim == null) {
        begin();
      }
      if (claim != null) {
        settle(with(1));
      }
    }

    private void settle(ObjectNode operation) throws Exception {
      operation.put("sequence", sequence).set("claim", claim.deepCopy());
      note(client.append(operation));
      String outcome = operation.get("outcome").asText();
      boolean isFenced = operation.path("error").asText().equals("ProducerFencedError");
      if (outcome.equals("done")) {
        sequence += operation.get("values").size();
      } else if (outcome.equals("unknown") || (isFenced && random.nextBoolean())) {
        claim = null; // else it tries again, as one that does not listen
      }
    }

    private void begin() throws Exception {
      ObjectNode begun = client.begin(PRODUCER);
      if (begun.get("outcome").asText().equals("done")) {
        claim = (ObjectNode) begun.get("claim");
        sequence = begun.get("sequence").asLong() + 1;
      }
    }

    private void read() throws Exception {
      switch (random.nextInt(3)) {
        case 0 -> note(client.read("", ""));
        case 1 -> note(client.read(known.some(random), ""));
        default -> note(client.read("", known.some(random)));
      }
    }
  }

  /** Makes one history. */
  private static ObjectNode make(
      Proxies proxies, ExecutorService threads, String name, long seed) throws Exception {
    Random random = new Random(seed);
    long began = System.nanoTime();
    LogClient first = new LogClient(proxies, name, 0, new Random(random.nextLong()), began);
    first.create();
    int[] weights = SHAPES[random.nextInt(SHAPES.length)];
    Board known = new Board();
    List<Worker> workers = new ArrayList<>();
    List<Future<Void>> running = new ArrayList<>();
    for (int number = 1, count = 3 + random.nextInt(3); number <= count; number++) {
      Random chance = new Random(random.nextLong());
      LogClient client = new LogClient(proxies, name, number, chance, began);
      Worker worker = new Worker(client, number, chance, weights, known);
      workers.add(worker);
      running.add(threads.submit(worker::run));
    }
    for (Future<Void> each : running) {
      each.get();
    }
    List<ObjectNode> done = new ArrayList<>();
    for (Worker worker : workers) {
      worker.client.close();
      done.addAll(worker.client.done);
    }
    done.sort(Comparator.comparingLong(operation -> operation.get("call").asLong()));
    for (int tries = 0; tries < LAST_READS; tries++) {
      ObjectNode last = first.read("", "");
      if (last.get("outcome").asText().equals("done")) {
        done.add(last);
        first.release();
        ObjectNode made = Proxies.JSON.createObjectNode();
        made.put("name", name).put("language", "java").put("seed", seed);
        made.putArray("operations").addAll(done);
        return made;
      }
    }
    throw new IllegalStateException("log " + name + " cannot be read");
  }

  /** Arguments: endpoints with commas between, how many histories, how many at once, seed, file. */
  public static void main(String[] arguments) throws Exception {
    Proxies proxies = new Proxies(List.of(arguments[0].split(",")));
    int count = Integer.parseInt(arguments[1]);
    long seed = Long.parseLong(arguments[3]);
    ExecutorService makers = Executors.newFixedThreadPool(Integer.parseInt(arguments[2]));
    ExecutorService threads = Executors.newCachedThreadPool();
    Thread parent = new Thread(Histories::endWithParent);
    parent.setDaemon(true);
    parent.start();
    List<Future<ObjectNode>> running = new ArrayList<>();
    for (int number = 0; number < count; number++) {
      String name = "blackbox/java-" + number;
      long own = seed + number;
      running.add(makers.submit(() -> make(proxies, threads, name, own)));
    }
    try (BufferedWriter file = Files.newBufferedWriter(Path.of(arguments[4]))) {
      for (Future<ObjectNode> each : running) {
        file.write(Proxies.JSON.writeValueAsString(each.get()));
        file.newLine();
        file.flush();
      }
    }
    System.exit(0); // not waiting for connections
  }

  /** Ends the program when whoever started it is gone. */
  private static void endWithParent() {
    try {
      while (System.in.read() >= 0) {
        continue;
      }
    } catch (java.io.IOException error) {
      // as if it had ended
    }
    System.exit(1);
  }
}
