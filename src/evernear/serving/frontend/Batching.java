package evernear;

import io.netty.channel.Channel;
import io.netty.channel.ChannelHandlerContext;
import io.netty.channel.EventLoopGroup;
import io.netty.channel.SimpleChannelInboundHandler;
import java.net.HttpURLConnection;
import java.util.ArrayDeque;
import java.util.Deque;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.LinkedBlockingDeque;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.locks.ReentrantLock;
import org.pytorch.serve.job.Job;
import org.pytorch.serve.util.Connector;
import org.pytorch.serve.util.messages.InputParameter;
import org.pytorch.serve.util.messages.ModelInferenceRequest;
import org.pytorch.serve.util.messages.ModelWorkerResponse;
import org.pytorch.serve.util.messages.Predictions;
import org.pytorch.serve.wlm.Model;
import org.pytorch.serve.wlm.ModelManager;
import org.pytorch.serve.wlm.ModelVersionedRefs;
import org.pytorch.serve.wlm.WorkerThread;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Sends requests to a worker as soon as it is idle, from the thread that reads them.
 *
 * <p>TorchServe passes each batch and its response through two threads for each worker, and lets each batch that is
 * not full wait for {@code maxBatchDelay}. With this class, the requests that arrive while a worker is busy are its
 * next batch, and a request passes through one thread.
 */
final class Batching {
    /** The thread of the inference API's connections and of the workers' connections. It never blocks. */
    static final EventLoopGroup LOOP = Connector.newEventLoopGroup(1);

    /** The headers that the handler reads. */
    private static final Set<String> FORWARDED = new TreeSet<>(String.CASE_INSENSITIVE_ORDER);

    static {
        FORWARDED.addAll(List.of("evernear-embedding", "evernear-probe", "traceparent"));
    }

    private static final Logger LOG = LoggerFactory.getLogger(Batching.class);

    private Batching() {}

    /**
     * Applies to all models, including models that are registered later.
     *
     * <p>Call this when TorchServe has registered the models of its configuration. Seconds pass before their workers
     * ask for requests.
     */
    static void install() {
        Models models = new Models();
        ModelManager manager = ModelManager.getInstance();
        models.putAll(Private.get(manager, "modelsNameMap"));
        models.values().forEach(Batching::apply);
        Private.set(manager, "modelsNameMap", models);
    }

    private static void apply(ModelVersionedRefs versions) {
        versions.getAllVersions().forEach(version -> apply(version.getValue()));
    }

    private static void apply(Model model) {
        Map<String, LinkedBlockingDeque<Job>> queues = Private.get(model, "jobsDb");
        queues.computeIfPresent(
                Model.DEFAULT_DATA_QUEUE,
                (name, queue) -> queue instanceof Queue ? queue : new Queue(model, queue.remainingCapacity()));
    }

    /** TorchServe's models. TorchServe adds each new version here before it starts the version's workers. */
    private static final class Models extends ConcurrentHashMap<String, ModelVersionedRefs> {
        @Override
        public ModelVersionedRefs putIfAbsent(String name, ModelVersionedRefs versions) {
            apply(versions);
            return super.putIfAbsent(name, versions);
        }
    }

    /** The requests for a model, and its idle workers. */
    private static final class Queue extends LinkedBlockingDeque<Job> {
        private final Model model;
        private final Deque<Worker> idle = new ArrayDeque<>(); // changed only on the event loop

        Queue(Model model, int capacity) {
            super(capacity);
            this.model = model;
        }

        /** Called for each request. The batch starts when the event loop has read all requests that have arrived. */
        @Override
        public boolean offer(Job job) {
            boolean accepted = super.offer(job);
            if (accepted) {
                LOOP.execute(this::dispatch);
            }
            return accepted;
        }

        /**
         * Called by a worker's thread when the worker has loaded the model. The thread gets no request. It only watches
         * the worker, and TorchServe restarts the worker after the exception.
         */
        @Override
        public Job poll(long timeout, TimeUnit unit) throws InterruptedException {
            Private.<ReentrantLock>get(model, "lock").unlock(); // which other workers' threads wait for
            Worker worker = new Worker(this, channelOfThisThread());
            LOOP.execute(worker::start);
            worker.watch();
            throw new IllegalStateException("The worker did not respond within " + model.getResponseTimeout() + " s.");
        }

        private Channel channelOfThisThread() throws InterruptedException {
            for (WorkerThread worker : ModelManager.getInstance().getWorkers(model.getModelVersionName())) {
                if (Private.<AtomicReference<Thread>>get(worker, "currentThread").get() == Thread.currentThread()) {
                    return Private.<List<Channel>>get(worker, "backendChannel").get(0);
                }
            }
            throw new InterruptedException("The worker has disconnected.");
        }

        void dispatch() {
            while (!idle.isEmpty() && !isEmpty()) {
                idle.poll().send();
            }
        }
    }

    /** A worker's connection. It has at most one batch in flight. Everything happens on the event loop. */
    private static final class Worker extends SimpleChannelInboundHandler<ModelWorkerResponse> {
        private static final int WATCH_MS = 1000;
        private static final int MAX_BYTES = 4 * 1024 * 1024; // a batch ends after this size, because it is copied

        private final Queue queue;
        private final Channel channel;
        private Map<String, Job> batch = Map.of();
        private volatile long started; // 0 without a batch

        Worker(Queue queue, Channel channel) {
            this.queue = queue;
            this.channel = channel;
        }

        /** Waits until a batch takes too long, or until TorchServe interrupts the thread, because the worker exited. */
        void watch() throws InterruptedException {
            long limit = TimeUnit.SECONDS.toNanos(queue.model.getResponseTimeout());
            long start;
            do {
                Thread.sleep(WATCH_MS);
                start = started;
            } while (start == 0 || System.nanoTime() - start < limit);
        }

        void start() {
            if (!channel.isActive()) {
                return;
            }
            channel.pipeline().removeLast(); // TorchServe's handler, which passes responses to the worker's thread
            channel.pipeline().addLast(this);
            channel.closeFuture().addListener(closed -> fail(HttpURLConnection.HTTP_INTERNAL_ERROR, "Worker died."));
            await();
        }

        private void await() {
            started = 0;
            if (channel.isActive()) {
                queue.idle.add(this);
                queue.dispatch();
            }
        }

        void send() {
            batch = new LinkedHashMap<>();
            ModelInferenceRequest request = new ModelInferenceRequest(queue.model.getModelName());
            int bytes = 0;
            Job job;
            while (batch.size() < queue.model.getBatchSize()
                    && bytes < MAX_BYTES
                    && (job = queue.poll()) != null) {
                job.setScheduled();
                for (InputParameter parameter : job.getPayload().getParameters()) {
                    bytes += parameter.getValue().length;
                }
                batch.put(job.getJobId(), job);
                job.getPayload().getHeaders().keySet().retainAll(FORWARDED);
                request.addRequest(job.getPayload());
            }
            started = System.nanoTime();
            channel.writeAndFlush(request, channel.voidPromise());
        }

        @Override
        protected void channelRead0(ChannelHandlerContext context, ModelWorkerResponse response) {
            if (response.getCode() != HttpURLConnection.HTTP_OK) {
                fail(response.getCode(), response.getMessage());
            }
            Map<String, Job> answered = batch;
            batch = Map.of();
            await(); // the next batch comes first, because the worker is idle
            for (Predictions prediction : response.getPredictions()) {
                respond(answered.get(prediction.getRequestId()), prediction);
            }
        }

        private static void respond(Job job, Predictions prediction) {
            try {
                job.response(
                        prediction.getResp(),
                        prediction.getContentType(),
                        prediction.getStatusCode(),
                        prediction.getReasonPhrase(),
                        prediction.getHeaders());
            } catch (RuntimeException fault) { // must not affect the other requests
                LOG.error("A response could not be sent.", fault);
            }
        }

        private void fail(int status, String message) {
            queue.idle.remove(this);
            batch.values().forEach(job -> job.sendError(status, message));
            batch = Map.of();
        }

        @Override
        public void exceptionCaught(ChannelHandlerContext context, Throwable fault) {
            LOG.error("The connection to a worker failed.", fault);
            context.close();
        }
    }
}
